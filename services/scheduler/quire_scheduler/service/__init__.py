"""The service around the core: sessions, the worker's link, watchers and events."""
