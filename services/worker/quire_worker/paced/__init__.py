"""The paced worker: the real worker process with timed steps of a made-up model. This module imports no torch and no
numba."""
