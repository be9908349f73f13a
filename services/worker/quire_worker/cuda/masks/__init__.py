"""Structured output on a GPU: the matcher's ring as the device sees it, and rows that are held."""
