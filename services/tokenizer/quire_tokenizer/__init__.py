"""Quire's tokenizer service: text to tokens and back. Knows nothing of engines, schedules or HTTP."""
