"""The router's public interfaces, HTTP and gRPC. Each converts requests of its wire format to jobs, and the deltas of a
job to its answer."""
