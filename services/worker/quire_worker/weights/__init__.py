"""Reads the files of a model folder into the tensors that the decoder uses."""
