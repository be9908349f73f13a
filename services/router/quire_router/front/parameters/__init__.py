"""The request parameters that HTTP and gRPC share: names, types, bounds, defaults."""
