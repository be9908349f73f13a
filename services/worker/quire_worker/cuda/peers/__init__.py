"""Memory of other workers' GPUs: driver calls, handles, and opened page pools."""
