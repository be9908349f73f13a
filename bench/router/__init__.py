"""The router by itself, between a scheduler and a tokenizer that are made for it."""
