"""Benchmarks of scheduler and worker with a delay between them."""
