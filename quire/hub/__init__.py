"""Finds models of the Hugging Face hub by name in the hub's cache on disk, and downloads them into that cache."""
