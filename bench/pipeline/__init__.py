"""Benchmarks of the five services together: throughput, latency, and the cost of each hop."""
