"""Parses request bodies: their fields, the bounds of fields, and the jobs made of them."""
