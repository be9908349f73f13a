"""The stages of `make gpu-check`: correctness and speed of the GPU worker, each well under ten minutes."""
