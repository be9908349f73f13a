"""Ring: memory that the engine and its KV transfer agent share. It has slots of one page each, and one counter.

The ring does not know which side holds which slot.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os

from quire_worker.kv_transfer.setup import SLOT_ALIGN, slot_stride

_COUNT_BYTES = 8


class Ring:
    """An anonymous file, mapped. The engine makes the ring, and the KV transfer agent inherits its descriptor.

    On a GPU, the engine registers the mapping with the driver (pinned memory), once, so that copies run beside the
    steps.
    """

    def __init__(self, fd: int, page_bytes: int, slots: int, flags: int = 0) -> None:
        self.fd = fd
        self.page_bytes = page_bytes
        self.slots = slots
        self._stride = slot_stride(page_bytes)
        end = self._stride * slots
        self._map = mmap.mmap(fd, end + SLOT_ALIGN, flags=mmap.MAP_SHARED | flags)
        self._bytes = memoryview(self._map)[:end]
        self._cancellations = memoryview(self._map)[end : end + _COUNT_BYTES].cast("Q")

    @classmethod
    def create(cls, page_bytes: int, slots: int) -> Ring:
        """Make a ring in a new anonymous file, whose size is then fixed if the kernel can seal files. Its memory is
        allocated at once, since a first touch later would stall the model thread."""
        fd = os.memfd_create("quire-mover-ring", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, slot_stride(page_bytes) * slots + SLOT_ALIGN)
            with contextlib.suppress(OSError):  # a kernel that cannot: no kvstore will read from it
                # A kvstore of this host reads it only if nobody can change its size under the reader.
                fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            return cls(fd, page_bytes, slots, mmap.MAP_POPULATE)
        except BaseException:
            os.close(fd)
            raise

    @property
    def memory(self) -> memoryview:
        """The memory of all slots. Release the view before `close`."""
        return self._bytes

    @property
    def cancellations(self) -> int:
        """The number of cancellations since the engine's present KV transfer agent began. Only the engine sets the
        counter. The agent sees a new value at once, while frames come a moment later."""
        return int(self._cancellations[0])

    @cancellations.setter
    def cancellations(self, times: int) -> None:
        self._cancellations[0] = times

    def slot(self, index: int) -> memoryview:
        """A writable view of one slot's page, to be released before `close`. Raises IndexError for a slot that the ring
        does not have."""
        if not 0 <= index < self.slots:
            raise IndexError(f"slot {index} of {self.slots}")
        start = index * self._stride
        return self._bytes[start : start + self.page_bytes]

    def offset_of(self, index: int) -> int:
        """Where in the file a slot begins."""
        return index * self._stride

    def close(self) -> None:
        """Unmap the memory and close the descriptor. Idempotent. Raises BufferError while a slot's view is not
        released: the memory stays mapped and the descriptor open, but the ring can only be closed again."""
        if self.fd >= 0:
            self._bytes.release()
            self._cancellations.release()
            self._map.close()
            os.close(self.fd)
            self.fd = -1
