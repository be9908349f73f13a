"""The engine's device on a CUDA GPU: a step is one upload, one graph launch and one download.

Its parts run on the CPU too, under Triton's interpreter and without graphs, which is how they are tested.
"""
