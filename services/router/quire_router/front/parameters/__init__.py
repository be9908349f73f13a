"""The parameters of a request that HTTP and gRPC share: names, types, bounds, defaults."""
