"""A GGUF file's tokenizer in the format of tokenizer.json: what tokenizers and matchers of grammars read alike."""
