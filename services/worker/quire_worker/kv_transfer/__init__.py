"""The mover: page I/O in a process of its own, beside the engine, over a shared ring of page-sized slots.

`python -m quire_worker.mover` is the process; MoverProcess is the engine's side of it. Neither imports torch.
"""
