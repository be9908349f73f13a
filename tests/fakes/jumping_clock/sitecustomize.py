"""Python's clocks, ahead by what a file says: every process that finds this folder in PYTHONPATH reads them so.

QUIRE_FAKE_CLOCK names a file of eight bytes, a little-endian int64 of nanoseconds. Clocks of native code (libuv's,
gRPC's) go on as they are, so timers fire as usual: what jumps is what Python code measures.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_FORMAT = struct.Struct("<q")


def _ahead(clock: Callable[[], Any], shared: mmap.mmap, per_ns: float | int) -> Callable[[], Any]:
    def now() -> Any:
        offset_ns: int = _FORMAT.unpack_from(shared)[0]
        return clock() + offset_ns * per_ns

    return now


def install(path: str) -> None:
    """From here on."""
    with Path(path).open("r+b") as file:
        shared = mmap.mmap(file.fileno(), _FORMAT.size)
    for name in ("time", "monotonic", "perf_counter"):
        setattr(time, name, _ahead(getattr(time, name), shared, 1e-9))
        setattr(time, f"{name}_ns", _ahead(getattr(time, f"{name}_ns"), shared, 1))


if "QUIRE_FAKE_CLOCK" in os.environ:
    install(os.environ["QUIRE_FAKE_CLOCK"])
