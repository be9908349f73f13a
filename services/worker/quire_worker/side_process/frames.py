"""Frames between the engine and a process beside it: small, length-framed, the same shape for all.

    length u32 | kind u8 | generation u32 | subject i64 | payload     little-endian; length counts what follows it

Each process has kinds of its own beside those here, and its own meaning of `generation` and `subject`. This module
knows nothing of what the frames bring about.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire_common.columns import i32, pack_i32

if TYPE_CHECKING:
    from collections.abc import Sequence

    from quire_worker.arrays import Int32

MAX_FRAME_BYTES = 64 << 20
_LENGTH = struct.Struct("<I")
_HEAD = struct.Struct("<BIq")
FRAME_HEAD_BYTES = _LENGTH.size + _HEAD.size
"""The header of a frame, before its payload."""


class ProcessFrameKind(enum.IntEnum):
    """Kinds that every process beside the engine has."""

    SETUP = 1
    """The first frame of the engine, once: the settings."""
    PING = 6
    READY = 16
    """The first frame of the process: it has read its settings."""
    PONG = 21


class WireError(Exception):  # says what it is; the process at the other end is then given up
    """The bytes that came in are not a frame."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One message."""

    kind: enum.IntEnum
    generation: int = 0
    subject: int = 0
    """The number of the page move or of the mask slot that the frame is about."""
    payload: bytes = b""

    @classmethod
    def of(cls, kind: enum.IntEnum, generation: int, subject: int, numbers: Sequence[int] | Int32) -> Frame:
        """A frame of an int32 column."""
        return cls(kind, generation, subject, pack_i32(numbers))

    def column(self) -> Int32:
        """Return the payload as an int32 array. Raises WireError if its size is not a multiple of 4 bytes."""
        if len(self.payload) % 4:
            raise WireError(f"a column of {len(self.payload)} bytes in {self.kind.name}")
        return i32(self.payload)

    def numbers(self) -> list[int]:
        """The payload's int32 column as a list. Raises WireError if its size is not a multiple of 4 bytes."""
        column: list[int] = self.column().tolist()
        return column

    def number(self) -> int:
        """The single number that the payload must hold. Raises WireError if it holds none or more."""
        column = self.numbers()
        if len(column) != 1:
            raise WireError(f"{len(column)} numbers in {self.kind.name}")
        return column[0]

    def pairs(self) -> list[tuple[int, int]]:
        """The payload's int32 column as a list of pairs, such as (index, slot). Raises WireError for an odd count."""
        column = self.numbers()
        if len(column) % 2:
            raise WireError(f"half a pair in {self.kind.name}")
        return list(zip(column[::2], column[1::2], strict=True))

    def pack(self) -> bytes:
        """Pack the frame, with its length before it."""
        size = _HEAD.size + len(self.payload)
        return _LENGTH.pack(size) + _HEAD.pack(self.kind, self.generation, self.subject) + self.payload


class FrameReader:
    """Cuts a byte stream into frames of one process's kinds."""

    def __init__(self, kinds: type[enum.IntEnum]) -> None:
        self._kinds = kinds
        self._data = bytearray()

    def feed(self, data: bytes) -> list[Frame]:
        """Take in bytes, and return the frames that are complete now; the bytes of an incomplete frame are kept. Raises
        WireError for a bad length or an unknown kind; frames of this call that came before it are then lost."""
        self._data += data
        frames, start = [], 0
        while len(self._data) - start >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(self._data, start)
            if not _HEAD.size <= size <= MAX_FRAME_BYTES:
                raise WireError(f"a frame of {size} bytes")
            end = start + _LENGTH.size + size
            if len(self._data) < end:
                break
            frames.append(self._frame(bytes(self._data[start + _LENGTH.size : end])))
            start = end
        del self._data[:start]
        return frames

    def _frame(self, data: bytes) -> Frame:
        """Unpack a frame, without its length; raises WireError for an unknown kind."""
        kind, generation, subject = _HEAD.unpack_from(data)
        try:
            return Frame(self._kinds(kind), generation, subject, data[_HEAD.size :])
        except ValueError:
            raise WireError(f"a frame of kind {kind}") from None
