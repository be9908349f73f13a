"""Samples tokens from logits, with counter-based random numbers."""
