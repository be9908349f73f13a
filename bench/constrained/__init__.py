"""Measures what sequences with grammars cost those that run beside them, and the time that masks take."""
