"""vLLM's KV event wire (ZMQ, msgpack) as an option, so that existing indexers can watch a Quire engine."""
