"""Memory that a writer lends: a descriptor of a memfd, from which pages are copied into the arena.

Why the store copies. The writer could instead have a part of the arena to write to, and the store make that visible as
it is; but a part that was once writable for others stays so for whoever mapped it, so each put would need a file of its
own, sealed after the writer has let go of it, never used again and never given back in part. Measured (2 MiB pages,
checksums on both sides, one thread after the other, memcpy 11.7 GB/s): sealed files 1.1 GB/s (new memory for each
page), a slab for the writer and a copy from there 6.1, a copy from where the page lies already 6.6. The mover has its
pages in shared memory anyway, so the last is also the least work, and what was verified is out of the writer's reach.

Why `preadv`, and no map: what the peer does to its file, cutting it short or punching holes into it, can neither kill
this process nor make it pay for memory. Descriptors that a read could wait for (pipes, sockets, files) are refused.
"""

from __future__ import annotations

import fcntl
import os

from quire_common.kv_data.frame import DataBroken


class LentMemory:
    """Owns its descriptor."""

    def __init__(self, fd: int) -> None:
        try:
            fcntl.fcntl(fd, fcntl.F_GET_SEALS)  # only memory knows seals
        except OSError as error:
            os.close(fd)
            raise DataBroken("bad_memory", "what was lent is no memory") from error
        self._fd = fd

    def copy(self, offset: int, into: memoryview) -> bool:
        """Fill `into` with what lies there; False where there is less."""
        try:
            return os.preadv(self._fd, [into], offset) == len(into)
        except (OSError, OverflowError):  # an offset that is none, a page that cannot be had
            return False

    def close(self) -> None:
        """Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
