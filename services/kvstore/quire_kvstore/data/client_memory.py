"""Memory that a writer lends: a memfd, mapped to be read, from which pages are copied into the arena.

Why the store copies. The writer could instead have a part of the arena to write to, and the store make that visible as
it is; but a part that was once writable for others stays so for whoever mapped it, so each put would need a file of its
own, sealed after the writer has let go of it, never used again and never given back in part. Measured (2 MiB pages,
checksums on both sides, one thread after the other, memcpy 11.7 GB/s): sealed files 1.1 GB/s (new memory for each
page), a slab for the writer and a copy from there 6.1, one copy from where the page lies already 9. The transfer agent
has its pages in shared memory anyway, so the last is the least work, and the copy is out of the writer's reach.

What is lent is not trusted. It must be memory (a read from a pipe or a file could wait), sealed against being cut short
(that would kill this process), and no larger than `max_bytes`: holes that are read become memory at our expense. That
the writer goes on writing while we copy is its own affair: the copy is what is verified.
"""

from __future__ import annotations

import fcntl
import mmap
import os

import numpy as np

from quire_common.kv_data.frame import DataConnectionError
from quire_common.pages import copy_body

_FIXED = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class ClientMemory:
    """A client's lent memory. Takes over `fd`; raises DataConnectionError."""

    def __init__(self, fd: int, max_bytes: int) -> None:
        try:
            if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _FIXED != _FIXED:  # only memory knows seals
                raise DataConnectionError("bad_memory", "what was lent could change its size")
            size = os.fstat(fd).st_size
            if not 0 < size <= max_bytes:
                raise DataConnectionError("bad_memory", f"{size} bytes were lent; the most is {max_bytes}")
            self._map = mmap.mmap(fd, size, prot=mmap.PROT_READ)
        except OSError as error:
            raise DataConnectionError("bad_memory", f"what was lent is no memory: {error}") from error
        finally:
            os.close(fd)
        self._bytes: np.ndarray[tuple[int], np.dtype[np.uint8]] | None = np.frombuffer(self._map, np.uint8)

    def copy(self, offset: int, header: bytes, into: memoryview) -> int:
        """Fill `into` with the page body that lies at `offset`. Returns the checksum of the copy under that header.
        Raises DataConnectionError if the lent memory ends before the body does."""
        if self._bytes is None or offset + len(into) > len(self._bytes):
            raise DataConnectionError("bad_memory", "what was lent does not reach so far")
        return copy_body(header, self._bytes[offset : offset + len(into)], into)

    def close(self) -> None:
        """Idempotent."""
        if self._bytes is not None:
            self._bytes = None
            self._map.close()
