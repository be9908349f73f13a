"""Decides which sequences run and how far: starts, page growth, slots, and the credit (positions that the worker may
compute) of each Grant."""
