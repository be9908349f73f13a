"""Sets how the C library gets memory for a service: from how many heaps, and for which sizes from the kernel itself.

glibc makes up to eight heaps for each core. Memory that was freed in one heap cannot be used by another. So the memory
of a few large requests on a dozen threads stays with the process, in pieces. In these services the threads share the
GIL, so they lose nothing by sharing heaps.

Large blocks come from the kernel one by one, and go back to it when they are freed. But whenever such a block is freed,
glibc takes further blocks of its size from a heap, where small blocks that are still in use keep the memory of large
ones from going back. So a router that has read some bodies of 4 MiB would keep 100 MiB. A fixed size avoids this.
"""

from __future__ import annotations

import ctypes
import os
from typing import Final

MOST_HEAPS: Final = 2
LARGE_BYTES: Final = 256 << 10
_M_ARENA_MAX, _M_MMAP_THRESHOLD = -8, -3


def set_malloc_limits() -> bool:
    """Limit the C library to MOST_HEAPS heaps, and take blocks of LARGE_BYTES and more from the kernel. Call this
    before any thread is started. Returns whether both were set. Settings of the environment (MALLOC_ARENA_MAX,
    MALLOC_MMAP_THRESHOLD_, GLIBC_TUNABLES) stay, and some C libraries have no such limits."""
    wanted = {
        ("MALLOC_ARENA_MAX", "glibc.malloc.arena_max"): (_M_ARENA_MAX, MOST_HEAPS),
        ("MALLOC_MMAP_THRESHOLD_", "glibc.malloc.mmap_threshold"): (_M_MMAP_THRESHOLD, LARGE_BYTES),
    }
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    done = [
        variable not in os.environ and tunable not in tunables and bool(mallopt(*setting))
        for (variable, tunable), setting in wanted.items()
    ]
    return all(done)
