"""The gRPC interface: codecs of quire.v1.Inference, limits of the port, and the engine contract of SMG."""
