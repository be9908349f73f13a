"""From files of a model folder to the tensors that the decoder computes with."""
