"""Renames code by a checked-in map, and proves that a commit did this and nothing else."""
