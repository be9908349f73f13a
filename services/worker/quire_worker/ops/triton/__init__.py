"""Ops in Triton, for CUDA devices; under Triton's interpreter they run on the CPU too, which is how they are tested."""
