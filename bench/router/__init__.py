"""Benchmarks of the router alone, with a fake scheduler and a fake tokenizer."""
