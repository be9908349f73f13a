"""One request's life, the same for HTTP and gRPC: job, choices, deltas. Knows neither HTTP nor protobuf's services."""
