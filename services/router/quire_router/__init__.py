"""The public edge of Quire: HTTP and gRPC in, the life of a request, placement. Knows no model and no torch."""
