"""Sets the time for which OpenMP's threads spin while they wait for work, before they sleep. It must be set before
torch is imported.

torch's wheels include GNU's OpenMP, which spins for 300,000 turns, or 2 to 14 ms. The OpenMP libraries of Intel and
LLVM spin for 200 ms. Torch computes only a small part of a step on the CPU. If one of its threads spins, it takes a
core from the threads of Quire's own kernels (see ops/cpu/kernel_thread_pool.py), which spin for 0.3 ms at most.
"""

from __future__ import annotations

from collections.abc import MutableMapping

DEFAULTS = {"GOMP_SPINCOUNT": "0", "KMP_BLOCKTIME": "0"}
_ASKED = ("OMP_WAIT_POLICY", *DEFAULTS)


def limit_spinning(environment: MutableMapping[str, str]) -> None:
    """Set the variables that make OpenMP's threads sleep at once, without spinning. Does nothing if the environment
    already says how threads wait."""
    if not any(name in environment for name in _ASKED):
        environment.update(DEFAULTS)
