"""Model families with RMS norms."""
