"""Memory of other workers' GPUs: calls of the driver, handles, and pools once they are open."""
