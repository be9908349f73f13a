"""Which replica runs a request: filter, score, pick. A policy per file, and a registry of them."""
