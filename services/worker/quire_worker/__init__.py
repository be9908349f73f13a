"""The muscle of one engine replica: weights, page pool, kernels, sampling, KV movement. Knows nothing of text."""
