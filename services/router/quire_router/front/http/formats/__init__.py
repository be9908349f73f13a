"""Answers: one format for each API that the router speaks."""
