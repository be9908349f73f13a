"""Implements `Ops` for the CPU: kernels compiled by numba, and the threads that run the kernels."""
