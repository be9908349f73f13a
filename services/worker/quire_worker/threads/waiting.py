"""How long OpenMP's threads spin while they wait for work, before they sleep. Must be said before torch is imported.

GNU's OpenMP, which torch's wheels bring, spins for 300,000 turns, which are 2 to 14 ms; Intel's and LLVM's spin 200 ms.
Torch's share of a step on the CPU is small: a thread of its that spins takes a core from the helpers of our own kernels
(see ops/cpu/kernel_thread_pool.py), which look for work for 0.3 ms at most.
"""

from __future__ import annotations

from collections.abc import MutableMapping

DEFAULTS = {"GOMP_SPINCOUNT": "0", "KMP_BLOCKTIME": "0"}
_ASKED = ("OMP_WAIT_POLICY", *DEFAULTS)


def limit_spinning(environment: MutableMapping[str, str]) -> None:
    """Change the environment, unless it already says how threads wait."""
    if not any(name in environment for name in _ASKED):
        environment.update(DEFAULTS)
