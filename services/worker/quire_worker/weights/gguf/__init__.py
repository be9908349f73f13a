"""Reads models that are GGUF files: blocks become numbers, tensor names become parameters, metadata becomes a
config."""
