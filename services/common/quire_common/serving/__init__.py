"""The life of a service process: its server, health, memory and drain."""
