"""Measures the effect of sequences with grammars on other sequences of the batch, and the time that masks take."""
