"""Device pages and the kvstore: who has them, what they hold, and where they go."""
