"""Answers that must match a grammar: what services tell one another of it."""
