"""Frames between the engine and its KV transfer agent. A frame carries the number of its move. The engine gives each
move a number of its own.

The payload is an int32 column, except for SETUP (JSON) and MOVE (see `pack_move`). The bytes of pages never travel in
frames: they lie in the ring. This module does not know the effects of the frames.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import replace
from typing import TYPE_CHECKING

from quire_common.credit import decode_move, encode_move
from quire_worker.kv_transfer.transports.registry import TRANSPORTS
from quire_worker.side_process.frames import Frame, ProcessFrameKind, WireError

if TYPE_CHECKING:
    from quire_common.credit import PageMove

_TRANSPORTS = ("", *dict.fromkeys(entry.name for entry in TRANSPORTS))
_SUBMITTED = struct.Struct("<q")


class AgentFrameKind(enum.IntEnum):
    """The kind of a frame. Either the engine or the agent owns a slot; a frame that names the slot hands it over."""

    # from the engine
    SETUP = ProcessFrameKind.SETUP
    """First of all, once: a AgentSetup."""
    MOVE = 2
    """Carry this move out."""
    FILLED = 3
    """Pages of a store or an export lie in the ring: index, slot, index, slot, ..."""
    RETURNED = 4
    """Slots of loads or pulls that the engine has emptied."""
    CANCEL = 5
    """Moves of generations before this frame's are void."""
    PING = ProcessFrameKind.PING
    CUT = 7
    """This move is void; the engine has ended it, or does when its last copies are over."""
    OFFERED = 8
    """Of an export, whose pages peers may fetch by themselves: so many, from the first on, are filled."""
    FETCHED = 9
    """Of a pull: so many more pages are in the pool as the peer's memory had them; -1: that cannot be opened."""
    # from the KV transfer agent
    READY = ProcessFrameKind.READY
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
    PONG = ProcessFrameKind.PONG
    FETCH = 22
    """Of a pull: the next pages are to be fetched from the peer's memory: the first one's index, the peer's pages."""
    KEPT = 23
    """Of a pull that goes on: so many of the pages that were fetched count, as their lease stood: all, or none."""


def transport_code(name: str) -> int:
    """A transport as a number; 0 is none."""
    return _TRANSPORTS.index(name)


def transport_name(code: int) -> str:
    """Return the name of a transport's number; raises WireError."""
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
