"""`Ops` for the CPU: compiled kernels, and the threads that run them."""
