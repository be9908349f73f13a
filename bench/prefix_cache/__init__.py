"""Benchmarks of how much prefill the prefix cache and the kvstore save in conversations."""
