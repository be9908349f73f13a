"""The engine's device on a CUDA GPU. A step is one upload, one graph launch and one download.

The parts also run on the CPU, under Triton's interpreter and without graphs. Tests use them in this way.
"""
