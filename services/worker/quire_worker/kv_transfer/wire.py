"""Frames between the engine and its KV transfer agent: small, length-framed, the same shape for all.

    length u32 | kind u8 | generation u32 | move i64 | payload     little-endian; length counts what follows it

`move` is a number that the engine gives to each move, and to no other. The payload is an int32 column, but for SETUP
(JSON) and MOVE (see `pack_move`). Bytes of pages never travel here: they lie in the ring. Knows nothing of what the
frames bring about.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from quire_common.columns import i32, pack_i32
from quire_common.credit import decode_move, encode_move
from quire_worker.kv_transfer.transports.registry import TRANSPORTS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from quire_common.credit import PageMove
    from quire_worker.arrays import Int32

MAX_FRAME_BYTES = 64 << 20
_LENGTH = struct.Struct("<I")
_HEAD = struct.Struct("<BIq")
_TRANSPORTS = ("", *dict.fromkeys(entry.name for entry in TRANSPORTS))
_SUBMITTED = struct.Struct("<q")


class AgentFrameKind(enum.IntEnum):
    """What a frame says. A slot belongs to one side at a time; the frames that name it hand it over."""

    # from the engine
    SETUP = 1
    """First of all, once: a AgentSetup."""
    MOVE = 2
    """Carry this move out."""
    FILLED = 3
    """Pages of a store or an export lie in the ring: index, slot, index, slot, ..."""
    RETURNED = 4
    """Slots of loads or pulls that the engine has emptied."""
    CANCEL = 5
    """Moves of generations before this frame's are void."""
    PING = 6
    CUT = 7
    """This move is void; the engine has ended it, or does when its last copies are over."""
    OFFERED = 8
    """Of an export, whose pages peers may fetch by themselves: so many, from the first on, are filled."""
    FETCHED = 9
    """Of a pull: so many more pages are in the pool as the peer's memory had them; -1: that cannot be opened."""
    # from the KV transfer agent
    READY = 16
    """It carries moves."""
    WANTED = 17
    """Of a store's or an export's pages these are to be put into the ring: a store's in this order, an export's when
    they are filled."""
    ARRIVED = 18
    """Pages of a load or a pull lie in the ring, whole and in order: index, slot, index, slot, ..."""
    RELEASED = 19
    """Slots of stores or exports that the KV transfer agent has emptied."""
    ENDED = 20
    """The move is over: how many of its pages, from the first on, are whole at their destination, and what has carried
    them (see `transport_code`). Pages that were fetched last count where they are among these."""
    PONG = 21
    FETCH = 22
    """Of a pull: the next pages are to be fetched from the peer's memory: the first one's index, the peer's pages."""
    KEPT = 23
    """Of a pull that goes on: so many of the pages that were fetched count, as their lease stood: all, or none."""


class WireError(Exception):  # says what it is; the process at the other end is then given up
    """What came in is no frame."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One message."""

    kind: AgentFrameKind
    generation: int = 0
    move: int = 0
    payload: bytes = b""

    @classmethod
    def of(cls, kind: AgentFrameKind, generation: int, move: int, numbers: Sequence[int] | Int32) -> Frame:
        """A frame of an int32 column."""
        return cls(kind, generation, move, pack_i32(numbers))

    def column(self) -> Int32:
        """The payload as an int32 column; raises WireError if it is none."""
        if len(self.payload) % 4:
            raise WireError(f"a column of {len(self.payload)} bytes in {self.kind.name}")
        return i32(self.payload)

    def numbers(self) -> list[int]:
        """The payload's int32 column as a list; raises WireError."""
        column: list[int] = self.column().tolist()
        return column

    def number(self) -> int:
        """The single number that the payload must hold; raises WireError."""
        column = self.numbers()
        if len(column) != 1:
            raise WireError(f"{len(column)} numbers in {self.kind.name}")
        return column[0]

    def pairs(self) -> list[tuple[int, int]]:
        """The payload as a list of (index, slot); raises WireError."""
        column = self.numbers()
        if len(column) % 2:
            raise WireError(f"half a pair in {self.kind.name}")
        return list(zip(column[::2], column[1::2], strict=True))

    def pack(self) -> bytes:
        """Pack the frame, with its length before it."""
        size = _HEAD.size + len(self.payload)
        return _LENGTH.pack(size) + _HEAD.pack(self.kind, self.generation, self.move) + self.payload


class FrameReader:
    """Cuts a byte stream into frames."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> list[Frame]:
        """Take in bytes, and return the frames that are complete now; the rest is kept. Raises WireError."""
        self._data += data
        frames, start = [], 0
        while len(self._data) - start >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(self._data, start)
            if not _HEAD.size <= size <= MAX_FRAME_BYTES:
                raise WireError(f"a frame of {size} bytes")
            end = start + _LENGTH.size + size
            if len(self._data) < end:
                break
            frames.append(_frame(bytes(self._data[start + _LENGTH.size : end])))
            start = end
        del self._data[:start]
        return frames


def transport_code(name: str) -> int:
    """A transport as a number; 0 is none."""
    return _TRANSPORTS.index(name)


def transport_name(code: int) -> str:
    """The inverse; raises WireError."""
    if not 0 <= code < len(_TRANSPORTS):
        raise WireError(f"transport {code}")
    return _TRANSPORTS[code]


def pack_move(move: PageMove, generation: int, number: int, submitted_ns: int) -> Frame:
    """Pack a MOVE frame, in which the move has `number` for an id; `submitted_ns` is `time.time_ns()`, where its span
    begins."""
    return Frame(
        AgentFrameKind.MOVE, generation, number, _SUBMITTED.pack(submitted_ns) + encode_move(replace(move, id=number))
    )


def unpack_move(frame: Frame) -> tuple[PageMove, int]:
    """Unpack a MOVE frame; returns the move and `submitted_ns`."""
    (submitted_ns,) = _SUBMITTED.unpack_from(frame.payload)
    return decode_move(frame.payload[_SUBMITTED.size :]), submitted_ns


def _frame(data: bytes) -> Frame:
    """Unpack a frame, without its length; raises WireError for an unknown kind."""
    kind, generation, move = _HEAD.unpack_from(data)
    try:
        return Frame(AgentFrameKind(kind), generation, move, data[_HEAD.size :])
    except ValueError:
        raise WireError(f"a frame of kind {kind}") from None
