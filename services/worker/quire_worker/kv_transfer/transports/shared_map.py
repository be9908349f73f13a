"""SharedMap: another process's memory, mapped to be read. Knows nothing of whose it is.

Offsets come from the wire and are compared with the file's size. The file must be sealed against being cut short, or a
read could kill this process. What its owner writes meanwhile is its own affair: copies are what is checked.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from typing import TYPE_CHECKING

import numpy as np

from quire_common.kv_data.frame import DataConnectionError
from quire_common.pages import PageCorrupt, copy_body

if TYPE_CHECKING:
    from numpy.typing import NDArray


class SharedMap:
    """Takes over `fd`. Raises DataConnectionError."""

    def __init__(self, fd: int) -> None:
        try:
            if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
                raise DataConnectionError("bad_memory", "the memory could be cut short")
            self.size = os.fstat(fd).st_size
            mapped = mmap.mmap(fd, self.size, prot=mmap.PROT_READ)
        except OSError as error:
            raise DataConnectionError("bad_memory", str(error)) from error
        finally:
            os.close(fd)
        self._bytes: NDArray[np.uint8] | None = np.frombuffer(mapped, np.uint8)

    @property
    def closed(self) -> bool:
        """Whether it has been let go."""
        return self._bytes is None

    def read(self, start: int, size: int) -> bytes:
        """What lies there."""
        return self._view(start, size).tobytes()

    def copy(self, start: int, header: bytes, into: memoryview) -> int:
        """Fill `into` with the body that lies there; returns the checksum of the copy under that header. Raises
        PageCorrupt where there is less, and DataConnectionError once it is closed."""
        return copy_body(header, self._view(start, len(into)), into)

    def close(self) -> None:
        """Let go of it: it is unmapped when nobody copies from it any more. Idempotent."""
        self._bytes = None

    def _view(self, start: int, size: int) -> NDArray[np.uint8]:
        found = self._bytes
        if found is None:
            raise DataConnectionError("ended", "the memory's owner has gone")
        if not 0 <= start <= start + size <= self.size:
            raise PageCorrupt(f"there is no page at {start}")
        return found[start : start + size]
