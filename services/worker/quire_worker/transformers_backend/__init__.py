"""The fallback: runs causal models that no family describes by transformers' own modelling code."""
