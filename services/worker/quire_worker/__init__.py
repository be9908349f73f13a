"""The worker service, which computes the steps of one replica: weights, page pool, kernels, sampling, KV transfer. It
knows nothing of text."""
