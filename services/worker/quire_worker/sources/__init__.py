"""Models whose config has been read, and whose weights are not loaded yet."""
