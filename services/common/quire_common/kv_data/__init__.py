"""Data connections of the kvstore, both ends' part: how frames look, and what makes them genuine.

Only the kvstore and the worker's transfer agent use it; they declare what it stands on.
"""
