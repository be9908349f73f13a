"""Benchmarks of more requests than a replica can serve, and of one API key that floods the others."""
