"""Memory that a writer lends to the store: a memfd, from which the store copies pages into the arena.

The store copies, because the writer must not be able to change a page later. The alternative is that the writer writes
into a part of the arena. But a process that has mapped memory as writable can write to it for ever. So each put would
need its own file, which is sealed after the put and never used again. Measurements (2 MiB pages, checksums on both
sides, one thread after the other, memcpy 11.7 GB/s): sealed files reach 1.1 GB/s, since each page needs new memory; a
copy from a slab that the writer fills reaches 6.1; one copy from the memory in which the page lies already reaches 9.
The KV transfer agent has its pages in shared memory anyway, so this last variant is also the least work.

The lent memory is not trusted. It must be memory, because a read from a pipe or a file could block. It must be sealed
against truncation, which would kill this process. It must not exceed `max_bytes`, because a hole that is read becomes
memory of the store. The writer may still write while the store copies. This does no harm, because the store verifies
the copy.
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
    """A client's lent memory. Takes over `fd`. Raises DataConnectionError unless that is memory of 1 to `max_bytes`
    bytes, sealed against a change of its size."""

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
        """Unmap the lent memory. Does nothing if that was done before."""
        if self._bytes is not None:
            self._bytes = None
            self._map.close()
