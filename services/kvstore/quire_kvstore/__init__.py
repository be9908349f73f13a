"""KV pages beyond one worker, by content. Knows nothing of tokens, models or schedules; never imports torch."""
