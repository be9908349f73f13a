"""Benchmarks of the CPU worker: its step, its attention, its neighbours."""
