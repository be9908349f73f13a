"""Models of the Hugging Face hub by name: where the cache has them, and how they get there."""
