"""How many heaps the C library gives to the threads of a service.

glibc makes up to eight for each core, and memory that was freed in one of them serves no other: what a few large
requests took on a dozen threads stays with the process, in pieces. Services whose threads share the interpreter lock
lose nothing by sharing heaps.
"""

from __future__ import annotations

import ctypes
import os
from typing import Final

MOST_HEAPS: Final = 2
_M_ARENA_MAX: Final = -8


def bound_heaps() -> bool:
    """Limit the C library to MOST_HEAPS heaps; to be called before threads have begun. Returns whether it was done: not
    where MALLOC_ARENA_MAX is set, nor by C libraries that have no such limit."""
    if "MALLOC_ARENA_MAX" in os.environ:
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    return bool(mallopt(_M_ARENA_MAX, MOST_HEAPS))
