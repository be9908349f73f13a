"""The gRPC edge: codecs of quire.v1.Inference, its limits, and the facade for SMG."""
