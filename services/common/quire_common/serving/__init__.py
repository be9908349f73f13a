"""The life of a service process: its server, health, memory, cache folder and drain."""
