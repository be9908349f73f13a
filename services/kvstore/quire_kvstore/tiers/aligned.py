"""Memory for direct I/O: whole aligned blocks, and copies that do not hold Python's lock."""

from __future__ import annotations

import contextlib
import mmap
import threading
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

BLOCK_BYTES = 4096
# Of memory: a sector, which disks can address; who wants more says so.
ALIGN_BYTES = 512
# Below it, a copy is over before another thread could make use of the interpreter.
_MIN_WITHOUT_GIL_BYTES = 32 << 10


def whole_blocks(size: int) -> int:
    """Return `size` rounded up to whole blocks of 4096 bytes."""
    return -(-size // BLOCK_BYTES) * BLOCK_BYTES


def is_aligned(view: memoryview) -> bool:
    """Return whether the memory begins at a multiple of 512 bytes, from which a disk can write and into which it can
    read."""
    return int(np.frombuffer(view, np.uint8).__array_interface__["data"][0]) % ALIGN_BYTES == 0


def copy_bytes(target: memoryview, source: memoryview) -> None:
    """Copy `source` into `target`, of the same size. From 32 KiB on, the copy does not hold the interpreter's lock."""
    if len(source) < _MIN_WITHOUT_GIL_BYTES:
        target[:] = source
    else:
        np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


class AlignedBuffers:
    """Aligned memory of each thread, kept between uses."""

    def __init__(self) -> None:
        self._local = threading.local()

    @contextlib.contextmanager
    def borrow(self, size: int) -> Iterator[memoryview]:
        """Context manager: yield `size` bytes of this thread's page-aligned memory, of any content. The memory is kept
        for the next use, and grows when needed. A thread must not borrow twice at once."""
        block: mmap.mmap | None = getattr(self._local, "block", None)
        if block is None or len(block) < size:
            block = self._local.block = mmap.mmap(-1, max(size, BLOCK_BYTES))
        with memoryview(block) as whole, whole[:size] as view:
            yield view


def skip_bytes(parts: list[memoryview], done: int) -> list[memoryview]:
    """Return the pieces of memory without the first `done` bytes of them all in a row; pieces that are skipped whole
    are left out."""
    rest: list[memoryview] = []
    for part in parts:
        if done < len(part):
            rest.append(part[done:])
        done = max(done - len(part), 0)
    return rest
