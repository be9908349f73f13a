"""The service around the core: routers' sessions, the link to the worker, watchers, and page events."""
