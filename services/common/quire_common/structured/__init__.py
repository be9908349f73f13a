"""Structured output: the constraints that services pass to each other, and the capability of workers to apply them."""
