"""The scheduler service: one engine replica's queue, KV page allocator and grants. It knows nothing of text or
tensors."""
