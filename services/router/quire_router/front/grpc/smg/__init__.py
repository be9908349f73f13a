"""vllm.grpc.engine.VllmEngine, the engine contract of SMG and llm-d, served by a router pinned to one scheduler."""
