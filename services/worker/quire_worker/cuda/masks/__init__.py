"""Structured output on a GPU: the device reads masks from the matcher's ring, and holds rows whose mask is missing."""
