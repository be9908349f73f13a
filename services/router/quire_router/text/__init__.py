"""Tokenizers as the router sees them: a pool of peers, unary calls, one Detokenize stream per session."""
