"""Prefill and decode apart: interference, transfers of pages, the first request."""
