"""Schedulers as the router sees them: replicas, their load, one Session stream each."""
