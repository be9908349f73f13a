"""Logs, traces and metrics, and the interceptors that produce them. This module knows nothing of what the services
do."""
