"""The scheduler service: one engine replica's queue, KV page allocator and grants. Knows nothing of text or tensors."""
