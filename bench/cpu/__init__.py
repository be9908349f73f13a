"""A small real model on the CPU, compared with transformers and llama.cpp."""
