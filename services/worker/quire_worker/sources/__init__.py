"""Models that were found and understood, and whose weights are still where they are."""
