"""Models whose config was read and understood, and whose weights are not loaded yet."""
