"""MaskRing: shared memory through which the matcher's processes pass masks to the engine.

A sequence with a grammar gets a *mask slot*, which has room for the masks of a few positions. The mask of position p
is in entry `p % entries_per_slot` of the slot. An entry starts with a stamp, which names the sequence and the position.
The stamp is 0 while the matcher writes the rest of the entry, so that no lock is needed.

The engine accepts an entry only if both stamp and hash match, in whatever order the matcher's stores become visible. A
GPU has no time to compute the hash. It reads the stamp, then the mask, then the stamp again, with fences in between. It
relies on the order of the matcher's stores: stamp 0, mask, stamp. On x86-64 they become visible in this order, since
each stamp is one aligned store apart from the copy of the mask.

A mask that is half written, or belongs to another position or sequence, counts as missing.
"""

from __future__ import annotations

import mmap
import os
import struct
from typing import TYPE_CHECKING, Final

import numpy as np
import xxhash

from quire_worker.sampling.token_mask import MaskKind, TokenMask, mask_bytes

if TYPE_CHECKING:
    from quire_worker.arrays import Int64, UInt8

MATCHER_THREADS: Final = 3
"""The number of threads of a process that compute masks; see matcher_threads."""
MOST_PROCESSES: Final = 32
_STATE_WORDS: Final = 3 * MATCHER_THREADS
# The head of an entry: the stamp, a hash of the stamp and all that follows the hash, kind and token. Then come the bits
# of the mask.
_STAMP: Final = struct.Struct("<q")
_HASH: Final = struct.Struct("<Q")
_KIND_AND_TOKEN: Final = struct.Struct("<q")
_HASHED_FROM: Final = _STAMP.size + _HASH.size
KIND_AND_TOKEN_AT: Final = _HASHED_FROM
"""The offset of an int64 in an entry, in bytes: its lowest byte is the kind of the mask, the others are the token."""
BITS_AT: Final = 128
"""The offset of the mask's bits in an entry, in bytes. They are int32 words."""
ENTRIES_AT: Final = 4096
"""The offset of the first entry, in bytes. The records of all processes come before it. Each entry, and its bits, start
with a whole line of 128 bytes, which a GPU reads at once."""
_KINDS: Final = {int(kind): kind for kind in MaskKind}


class MaskRing:
    """A mapped anonymous file. The engine creates it, and the matcher's processes inherit its file descriptor.

    The memory has a record for each process: the sequences on which it works, and its number of masks. A MaskRing has
    the record of one process, and the entries of all."""

    def __init__(self, fd: int, mask_slots: int, entries_per_slot: int, vocab_size: int, process: int = 0) -> None:
        if not 0 <= process < MOST_PROCESSES:
            raise IndexError(f"process {process} of {MOST_PROCESSES}")
        self.fd = fd
        self.process = process
        """The index of the process whose record the object has."""
        self.mask_slots = mask_slots
        self.entries_per_slot = entries_per_slot
        self.words = mask_bytes(vocab_size) // 4
        """The length of a mask, in int32 words."""
        self.entry_bytes = _entry_bytes(vocab_size)
        self._vocab_size = vocab_size
        self._map = mmap.mmap(fd, _size(mask_slots, entries_per_slot, vocab_size))
        self.memory: UInt8 = np.frombuffer(self._map, np.uint8)
        """The whole memory. From ENTRIES_AT on, it has the entries of the first mask slot, then those of the next."""
        stamps = self.memory[ENTRIES_AT:].view(np.int64).reshape(mask_slots * entries_per_slot, -1)
        self._stamps: Int64 = stamps[:, 0]
        state = np.frombuffer(self._map, np.int64, _STATE_WORDS * MOST_PROCESSES).reshape(MOST_PROCESSES, _STATE_WORDS)[
            process
        ]
        self._busy: Int64 = state[:MATCHER_THREADS]
        self._counters: Int64 = state[MATCHER_THREADS:].reshape(MATCHER_THREADS, 2)

    @classmethod
    def create(cls, mask_slots: int, entries_per_slot: int, vocab_size: int) -> MaskRing:
        """Create a ring in a new anonymous file, for masks of `vocab_size` tokens."""
        fd = os.memfd_create("quire-masks", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, _size(mask_slots, entries_per_slot, vocab_size))
            return cls(fd, mask_slots, entries_per_slot, vocab_size)
        except BaseException:
            os.close(fd)
            raise

    def of_process(self, process: int) -> MaskRing:
        """Map the same memory again, with the record of another process."""
        fd = os.dup(self.fd)
        try:
            return MaskRing(fd, self.mask_slots, self.entries_per_slot, self._vocab_size, process)
        except BaseException:
            os.close(fd)
            raise

    def put(self, mask_slot: int, generation: int, position: int, mask: TokenMask) -> None:
        """Write the mask of the token at `position`, for the sequence of this generation, over an older mask in its
        entry. The stamp is 0 meanwhile, so that a reader finds the mask missing. Raises IndexError for an unknown mask
        slot."""
        index, begin, stamp = *self._entry_of(mask_slot, position), stamp_of(generation, position)
        kind_and_token = _KIND_AND_TOKEN.pack(int(mask.kind) | mask.token << 8).ljust(
            BITS_AT - KIND_AND_TOKEN_AT, b"\0"
        )
        # A mask without bits keeps those of the mask before it in the entry, and they are part of its hash.
        digest = xxhash.xxh3_64(_STAMP.pack(stamp) + kind_and_token)
        digest.update(mask.bits or self._map[begin + BITS_AT : begin + self.entry_bytes])
        self._stamps[index] = 0
        self._map[begin + _STAMP.size : begin + BITS_AT] = _HASH.pack(digest.intdigest()) + kind_and_token
        if mask.bits:
            self._map[begin + BITS_AT : begin + self.entry_bytes] = mask.bits
        self._stamps[index] = stamp

    def mask_at(self, mask_slot: int, generation: int, position: int) -> TokenMask | None:
        """Read the mask of the token at `position`, for the sequence of this generation. Returns None if stamp or hash
        do not match: the mask is missing, or half written. Raises IndexError for an unknown mask slot."""
        index, begin = self._entry_of(mask_slot, position)
        stamp = stamp_of(generation, position)
        if self._stamps[index] != stamp:
            return None
        entry = self._map[begin : begin + self.entry_bytes]
        hashed = _STAMP.pack(stamp) + entry[_HASHED_FROM:]
        (kind_and_token,) = _KIND_AND_TOKEN.unpack_from(entry, KIND_AND_TOKEN_AT)
        kind = _KINDS.get(kind_and_token & 0xFF)
        if kind is None or _HASH.unpack_from(entry, _STAMP.size)[0] != xxhash.xxh3_64_intdigest(hashed):
            return None
        return TokenMask(kind, kind_and_token >> 8, b"" if kind == MaskKind.ONE else entry[BITS_AT:])

    def set_busy(self, thread: int, generation: int) -> None:
        """Record the sequence (generation) on which a thread of the process works; 0: none. After a crash, the engine
        suspects the grammars of these sequences."""
        self._busy[thread] = generation

    def pop_busy(self) -> set[int]:
        """Return the sequences on which the process worked when it ended, and clear the record."""
        busy = {int(each) for each in self._busy if each}
        self._busy[:] = 0
        return busy

    def count_mask(self, thread: int, elapsed_ns: int) -> None:
        """Add a mask to the totals of a thread of the process: its number of masks, and their wall time."""
        self._counters[thread, 0] += 1
        self._counters[thread, 1] += elapsed_ns

    @property
    def mask_totals(self) -> tuple[int, int]:
        """Return the number of masks that `count_mask` has counted for this process since the ring was created, and the
        nanoseconds that they took. A sequence's first mask after its compilation or replay is not counted."""
        count, elapsed_ns = self._counters.sum(axis=0).tolist()
        return count, elapsed_ns

    def _entry_of(self, mask_slot: int, position: int) -> tuple[int, int]:
        """Return the index of a position's entry, and its offset in the memory. Raises IndexError for a mask slot that
        the ring does not have."""
        if not 0 <= mask_slot < self.mask_slots:
            raise IndexError(f"mask slot {mask_slot} of {self.mask_slots}")
        index = mask_slot * self.entries_per_slot + position % self.entries_per_slot
        return index, ENTRIES_AT + index * self.entry_bytes

    def close(self) -> None:
        """Close the file descriptor. The memory is freed when nothing refers to it. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def stamp_of(generation: int, position: int) -> int:
    """Return the stamp of a mask: 31 bits of the generation, and the position."""
    return (generation & 0x7FFFFFFF) << 32 | position


def _entry_bytes(vocab_size: int) -> int:
    return BITS_AT + mask_bytes(vocab_size)


def _size(mask_slots: int, entries_per_slot: int, vocab_size: int) -> int:
    return ENTRIES_AT + mask_slots * entries_per_slot * _entry_bytes(vocab_size)
