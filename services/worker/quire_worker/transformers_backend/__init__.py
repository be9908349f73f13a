"""The Transformers backend runs causal models for which Quire has no family: the modelling code of the package
transformers computes their layers, and Quire's kernels compute attention over KV pages."""
