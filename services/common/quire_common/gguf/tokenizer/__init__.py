"""Converts a GGUF file's tokenizer to the format of tokenizer.json. Tokenizers and grammar matchers read the same
result."""
