"""Data connections of the kvstore, used at both ends: the format of frames, and their authentication.

Only the kvstore and the worker's transfer agent use this package; they declare the libraries that it needs.
"""
