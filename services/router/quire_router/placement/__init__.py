"""Which replica runs a request. A policy per file, and a registry of them."""
