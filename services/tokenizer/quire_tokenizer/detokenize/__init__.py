"""Streams of tokens as streams of text, and where stop strings end them."""
