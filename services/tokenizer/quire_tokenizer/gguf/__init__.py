"""A GGUF file's tokenizer and chat templates, in the form that a model folder would have them."""
