"""Renames code by a map that is checked in, and proves that a commit did that and nothing else."""
