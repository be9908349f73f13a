"""More requests than a replica can serve, and one API key that floods the others."""
