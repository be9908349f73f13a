"""Compares each kernel of a step with its floor, the least possible time."""
