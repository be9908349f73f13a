"""How long OpenMP's threads spin while they wait for work, before they sleep. Must be said before torch is imported.

GNU's OpenMP, which torch's wheels bring, spins for 300,000 turns, which are 2 to 14 ms; Intel's and LLVM's spin 200 ms.
Within a step the next product mostly follows sooner than two thirds of that. Waking a thread takes longer than a small
product.
"""

from __future__ import annotations

from collections.abc import MutableMapping

DEFAULTS = {"GOMP_SPINCOUNT": "200000", "KMP_BLOCKTIME": "1"}
"""A turn of GNU's loop is a `pause`, 6 to 45 ns. With a quarter as many turns threads sleep between the products of one
step, and a lone worker makes 15 % fewer tokens. KMP_BLOCKTIME is in milliseconds."""
_ASKED = ("OMP_WAIT_POLICY", *DEFAULTS)


def limit_spinning(environment: MutableMapping[str, str]) -> None:
    """Change the environment, unless it already says how threads wait."""
    if not any(name in environment for name in _ASKED):
        environment.update(DEFAULTS)
