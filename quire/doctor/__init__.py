"""Checks of the machine that Quire is to run on."""
