"""Structured output: a process beside the engine compiles grammars and makes masks of the tokens that they allow."""
