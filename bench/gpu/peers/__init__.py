"""Benchmarks of copying KV pages from one GPU's memory to another's."""
