"""Checks of a machine on which Quire is to run."""
