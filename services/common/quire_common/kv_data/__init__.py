"""Data connections of the kvstore, both ends' part: how frames look, and what makes them genuine.

Only the kvstore and the worker's mover use it; they declare what it stands on.
"""
