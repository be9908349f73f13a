"""Limits the number of heaps that the C library gives to the threads of a service.

glibc makes up to eight heaps for each core. Memory that was freed in one heap cannot be used by another. So the memory
of a few large requests on a dozen threads stays with the process, in pieces. In these services the threads share the
GIL, so they lose nothing by sharing heaps.
"""

from __future__ import annotations

import ctypes
import os
from typing import Final

MOST_HEAPS: Final = 2
_M_ARENA_MAX: Final = -8


def bound_heaps() -> bool:
    """Limit the C library to MOST_HEAPS heaps; call this before any thread is started. Returns whether the limit was
    set. It is not set if MALLOC_ARENA_MAX is set, or if the C library has no such limit."""
    if "MALLOC_ARENA_MAX" in os.environ:
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    return bool(mallopt(_M_ARENA_MAX, MOST_HEAPS))
