"""MaskRing: memory in which the matcher's processes leave masks for the engine, by seat and position.

The mask of position p is in place p % places of its seat. There is no lock. A place begins with a stamp, which names
the sequence and the position; it is 0 while the rest is written.

The engine accepts a place only if stamp and hash match, in whatever order stores arrive. A GPU has no time for the
hash. It reads the stamp, then the mask, then the stamp again, with fences between, and relies on the order of the
writer's stores: stamp 0, mask, stamp. On x86-64 they become visible in this order, since each stamp is one aligned
store apart from the copy of the mask. A mask that is half written, or of another position or sequence, counts as
absent. The ring knows nothing of grammars.
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
"""Threads of a process that work on seats."""
MOST_PROCESSES: Final = 32
_STATE_WORDS: Final = 3 * MATCHER_THREADS
# A place's head: its stamp, the hash over stamp and all that follows, kind and token. The mask's bits follow.
_STAMP: Final = struct.Struct("<q")
_HASH: Final = struct.Struct("<Q")
_KIND_AND_TOKEN: Final = struct.Struct("<q")
_HASHED_FROM: Final = _STAMP.size + _HASH.size
KIND_AND_TOKEN_AT: Final = _HASHED_FROM
"""Offset in a place, in bytes: kind, and from the ninth bit on the token, as int64."""
BITS_AT: Final = 64
"""Offset of the bits, as int32."""
_LINE: Final = 64
ENTRIES_AT: Final = 4096
"""Where the first place begins, behind the words of all processes: a line of the processor's cache, as all do."""
_KINDS: Final = {int(kind): kind for kind in MaskKind}


class MaskRing:
    """An anonymous file, mapped. The engine makes it, the processes inherit its descriptor. Each object has the words
    of one process, which say on what it works and how many masks it has made, and the places of all."""

    def __init__(self, fd: int, mask_slots: int, entries_per_slot: int, vocab_size: int, process: int = 0) -> None:
        if not 0 <= process < MOST_PROCESSES:
            raise IndexError(f"process {process} of {MOST_PROCESSES}")
        self.fd = fd
        self.mask_slots = mask_slots
        self.entries_per_slot = entries_per_slot
        self.words = mask_bytes(vocab_size) // 4
        """Length of a mask, in int32."""
        self.entry_bytes = _entry_bytes(vocab_size)
        self._vocab_size = vocab_size
        self._used = BITS_AT + mask_bytes(vocab_size)
        self._map = mmap.mmap(fd, _size(mask_slots, entries_per_slot, vocab_size))
        self.memory: UInt8 = np.frombuffer(self._map, np.uint8)
        """All of it. Places follow one another from PLACES_AT on, seat after seat."""
        stamps = self.memory[ENTRIES_AT:].view(np.int64).reshape(mask_slots * entries_per_slot, -1)
        self._stamps: Int64 = stamps[:, 0]
        state = np.frombuffer(self._map, np.int64, _STATE_WORDS * MOST_PROCESSES).reshape(MOST_PROCESSES, _STATE_WORDS)[
            process
        ]
        self._busy: Int64 = state[:MATCHER_THREADS]
        self._counters: Int64 = state[MATCHER_THREADS:].reshape(MATCHER_THREADS, 2)

    @classmethod
    def create(cls, mask_slots: int, entries_per_slot: int, vocab_size: int) -> MaskRing:
        """Make a ring in a new anonymous file, for masks of so many tokens."""
        fd = os.memfd_create("quire-masks", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, _size(mask_slots, entries_per_slot, vocab_size))
            return cls(fd, mask_slots, entries_per_slot, vocab_size)
        except BaseException:
            os.close(fd)
            raise

    def of_process(self, process: int) -> MaskRing:
        """Map the same memory again, with the words of another process."""
        return MaskRing(os.dup(self.fd), self.mask_slots, self.entries_per_slot, self._vocab_size, process)

    def put(self, mask_slot: int, generation: int, position: int, mask: TokenMask) -> None:
        """Leave the mask of the token at `position` of the sequence that has the seat as its `generation`."""
        index, begin, stamp = *self._entry_of(mask_slot, position), stamp_of(generation, position)
        kind_and_token = _KIND_AND_TOKEN.pack(int(mask.kind) | mask.token << 8).ljust(
            BITS_AT - KIND_AND_TOKEN_AT, b"\0"
        )
        # A mask without bits leaves those of the one before in its place, and is hashed with them.
        digest = xxhash.xxh3_64(_STAMP.pack(stamp) + kind_and_token)
        digest.update(mask.bits or self._map[begin + BITS_AT : begin + self._used])
        self._stamps[index] = 0
        self._map[begin + _STAMP.size : begin + BITS_AT] = _HASH.pack(digest.intdigest()) + kind_and_token
        if mask.bits:
            self._map[begin + BITS_AT : begin + self._used] = mask.bits
        self._stamps[index] = stamp

    def mask_at(self, mask_slot: int, generation: int, position: int) -> TokenMask | None:
        """Read a mask; None: it is not there, or not whole."""
        index, begin = self._entry_of(mask_slot, position)
        stamp = stamp_of(generation, position)
        if self._stamps[index] != stamp:
            return None
        entry = self._map[begin : begin + self._used]
        hashed = _STAMP.pack(stamp) + entry[_HASHED_FROM:]
        (kind_and_token,) = _KIND_AND_TOKEN.unpack_from(entry, KIND_AND_TOKEN_AT)
        kind = _KINDS.get(kind_and_token & 0xFF)
        if kind is None or _HASH.unpack_from(entry, _STAMP.size)[0] != xxhash.xxh3_64_intdigest(hashed):
            return None
        return TokenMask(kind, kind_and_token >> 8, b"" if kind == MaskKind.ONE else entry[BITS_AT:])

    def set_busy(self, thread: int, generation: int) -> None:
        """Note which sequence a thread of the process works on; 0: none. After a crash it says who was at fault."""
        self._busy[thread] = generation

    def pop_busy(self) -> set[int]:
        """The sequences on which the process worked when it ended; forgets them."""
        busy = {int(each) for each in self._busy if each}
        self._busy[:] = 0
        return busy

    def count_mask(self, thread: int, elapsed_ns: int) -> None:
        """Add to the number of masks that a thread of the process has made, and to their time."""
        self._counters[thread, 0] += 1
        self._counters[thread, 1] += elapsed_ns

    @property
    def mask_totals(self) -> tuple[int, int]:
        """Return the number of masks that the process has made since the ring was made, and the nanoseconds that they
        took."""
        count, elapsed_ns = self._counters.sum(axis=0).tolist()
        return count, elapsed_ns

    def _entry_of(self, mask_slot: int, position: int) -> tuple[int, int]:
        """The number of a position's place, and where it begins. Raises IndexError for a seat that is not there."""
        if not 0 <= mask_slot < self.mask_slots:
            raise IndexError(f"seat {mask_slot} of {self.mask_slots}")
        index = mask_slot * self.entries_per_slot + position % self.entries_per_slot
        return index, ENTRIES_AT + index * self.entry_bytes

    def close(self) -> None:
        """Close the descriptor. The memory goes with the last reader of it. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def stamp_of(generation: int, position: int) -> int:
    """The stamp of a mask: no other mask has it that could be meant."""
    return (generation & 0x7FFFFFFF) << 32 | position


def _entry_bytes(vocab_size: int) -> int:
    return BITS_AT + -(-mask_bytes(vocab_size) // _LINE) * _LINE


def _size(mask_slots: int, entries_per_slot: int, vocab_size: int) -> int:
    return ENTRIES_AT + mask_slots * entries_per_slot * _entry_bytes(vocab_size)
