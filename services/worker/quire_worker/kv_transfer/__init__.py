"""The KV transfer agent: page I/O in a process of its own, beside the engine, over a shared ring of page-sized slots.

`python -m quire_worker.kv_transfer` is the process; AgentProcess is the engine's side of it. Neither imports torch.
"""
