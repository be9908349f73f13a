"""Reads the tokenizer and the chat templates of a GGUF file, in the form of a model folder."""
