"""KV pages beyond one process: the store's client, and events of pages."""
