"""The memory for pages: one file without a name. Other processes of this host may map it, but only to read.

A slab is a head of 512 bytes and a page. So each page begins where a disk can write from memory and read into it
directly. The last 64 bytes of the head begin with the page's *generation*: a number that no other page has, and that is
wiped before the slab is used again. A reader copies a page without asking the store, and then checks the generation. If
it is still the same, the copy is of that page, from beginning to end.

The file is sealed (see SEALS). This process writes through a mapping that it made before. No holder of the descriptor
can map the file to write, write to it, or shrink it under a reader, even if it opens the file again. The file is gone
when its last descriptor is closed, even if the process crashes. Its memory becomes resident as it is written. Not
thread-safe: the store's lock guards it.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import struct

from quire_kvstore.slab_allocator import SlabAllocator

HEAD_BYTES = 512
# In <linux/fcntl.h>; Python's fcntl does not know it.
_F_SEAL_FUTURE_WRITE = 0x10
SEALS = _F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
# In <linux/mman.h>; Python's mmap does not know it.
_MADV_POPULATE_WRITE = 23
_GENERATION = struct.Struct("<Q")
# Before the page.
_GENERATION_AT = 64


class Arena:
    """`capacity_bytes` of memory. Other processes map it by `fd`, which is read-only; `fd` is None if the kernel cannot
    seal the file."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self._slabs = SlabAllocator(capacity_bytes)
        fd = os.memfd_create("quire-kvstore-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, capacity_bytes)
            self._map = mmap.mmap(fd, capacity_bytes)
            self.fd = _sealed(fd)
        finally:
            os.close(fd)
        self._view = memoryview(self._map)
        # Random where it starts, so that a generation of an earlier life is none of this one's.
        self._next_generation = secrets.randbits(62) + 1

    @property
    def used_bytes(self) -> int:
        """Bytes of the slabs that are in use."""
        return self._slabs.used_bytes

    @staticmethod
    def footprint(size: int) -> int:
        """Return how many bytes a page of `size` takes in the arena: the head of 512 bytes, and the page rounded up to
        a multiple of 512."""
        return HEAD_BYTES + -(-size // HEAD_BYTES) * HEAD_BYTES

    def populate(self, start: int, size: int) -> None:
        """Make a part of the memory resident, whether pages use it or not. Raises OSError if the kernel cannot do this
        (before Linux 5.14)."""
        self._map.madvise(_MADV_POPULATE_WRITE, start, min(size, self.capacity_bytes - start))

    def allocate(self, size: int) -> int | None:
        """Allocate room for a page of `size`, and give it a new generation. Returns the page's offset; None if there is
        no room."""
        slab = self._slabs.allocate(self.footprint(size))
        if slab is None:
            return None
        _GENERATION.pack_into(self._view, slab + HEAD_BYTES - _GENERATION_AT, self._next_generation)
        self._next_generation += 1
        return slab + HEAD_BYTES

    def free(self, offset: int) -> None:
        """Free the slab of the page at this offset, and wipe the page's generation. Raises KeyError if there is no such
        page."""
        slab = offset - HEAD_BYTES
        self._slabs.free(slab)
        _GENERATION.pack_into(self._view, offset - _GENERATION_AT, 0)

    def generation(self, offset: int) -> int:
        """Return the generation of the page at this offset."""
        return int(_GENERATION.unpack_from(self._view, offset - _GENERATION_AT)[0])

    def view(self, offset: int, size: int) -> memoryview:
        """Return the bytes at this offset. The caller must own them, and must release the view."""
        return self._view[offset : offset + size]

    def close(self) -> None:
        """Unmap the memory and close its descriptor. No view of the memory may be left."""
        self._view.release()
        self._map.close()
        if self.fd is not None:
            os.close(self.fd)

    def check_integrity(self) -> None:
        self._slabs.check_integrity()


def _sealed(fd: int) -> int | None:
    """Seal the memory (SEALS), and return a new, read-only descriptor of it; `fd` stays open. Returns None if the
    kernel does not know these seals (Linux before 5.1, some sandboxes)."""
    try:
        os.fchmod(fd, 0o400)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
        return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
