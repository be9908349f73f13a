"""The paced worker: the real worker process with timed steps of a made-up model. Imports no torch and no numba."""
