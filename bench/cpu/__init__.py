"""A small real model on the CPU, beside transformers and llama.cpp."""
