"""Logs, traces and metrics, and the interceptors that produce them. Knows nothing of what the services do."""
