"""Device pages and their traffic with the kvstore: who holds them, what they contain, and where they are copied."""
