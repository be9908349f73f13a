"""Decides how many processor cores this worker uses, together with its other threads and other processes of the
machine."""
