"""Benchmarks of prefill and decode replicas: interference, transfers of pages, the first request."""
