"""Commands that make keys and certificates."""
