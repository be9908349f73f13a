"""Quire's tokenizer service: text to tokens and back. It knows nothing of engines, schedules or HTTP."""
