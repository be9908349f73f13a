"""Models that are GGUF files: blocks to numbers, tensor names to parameters, metadata to a config."""
