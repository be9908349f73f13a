"""Scheduler and worker with a delay between them."""
