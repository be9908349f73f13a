"""The kvstore: KV pages beyond one worker, found by their content. It knows nothing of tokens, models or schedules, and
never imports torch."""
