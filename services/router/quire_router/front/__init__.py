"""The router's public edges: HTTP and gRPC. Each turns its wire format into jobs, and deltas into its answers."""
