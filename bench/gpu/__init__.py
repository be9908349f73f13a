"""Benchmarks of the GPU worker: engines, tables, and the programs that choose kernel configs."""
