"""Ops in Triton, for CUDA devices. They also run on the CPU under Triton's interpreter; tests use them in this way."""
