"""Files with damaged headers: a reader reads or refuses each of them, in bounded memory."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

INPUTS = 2_000
# Objects of Python for each pair or tensor of a file of a kilobyte, and no more than that.
_MOST_BYTES = 128 << 10


def check_damaged_headers(path: Path, damage: Callable[[], bytes], read: Callable[[Path], bool]) -> None:
    """Read INPUTS files of damaged bytes. `read` returns whether it read the file, and fails a test if the file is
    refused without a typed error."""
    accepted, most = 0, 0
    tracemalloc.start()
    try:
        for _ in range(INPUTS):
            path.write_bytes(damage())
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            accepted += read(path)
            most = max(most, tracemalloc.get_traced_memory()[1] - before)
    finally:
        tracemalloc.stop()
    assert most < _MOST_BYTES
    assert 0 < accepted < INPUTS // 2, "the changes neither spare nor spoil everything"
