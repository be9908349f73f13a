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
    """The first frame, sent once: an AgentSetup."""
    MOVE = 2
    """The agent must carry out this move."""
    FILLED = 3
    """Pages of a store or an export lie in the ring: index, slot, index, slot, ..."""
    RETURNED = 4
    """Slots of loads or pulls that the engine has emptied."""
    CANCEL = 5
    """All moves of generations before this frame's are cancelled."""
    PING = ProcessFrameKind.PING
    CUT = 7
    """This move is cancelled. The engine has ended it, or ends it when its last copies are done."""
    OFFERED = 8
    """The first n pages of an export are filled; peers may fetch them from the engine's memory."""
    FETCHED = 9
    """n more pages of a pull were copied from the peer's memory into the pool; -1: they cannot be fetched."""
    # from the KV transfer agent
    READY = ProcessFrameKind.READY
    """The agent is ready to carry out moves."""
    WANTED = 17
    """The engine must put these pages of a store or an export into the ring: those of a store in this order, those of
    an export when they are filled."""
    ARRIVED = 18
    """Pages of a load or a pull lie in the ring, whole and in order: index, slot, index, slot, ..."""
    RELEASED = 19
    """Slots of stores or exports that the KV transfer agent has emptied."""
    ENDED = 20
    """The move is over. The first number counts its pages, from the first on, that are whole at their destination; the
    second is the code of their transport (see `transport_code`). The pages fetched last count if they are included."""
    PONG = ProcessFrameKind.PONG
    FETCH = 22
    """The engine must fetch the next pages of a pull from the peer's memory: index of the first, then peer pages."""
    KEPT = 23
    """n fetched pages of a running pull count, since their lease held: all of them, or none."""


def transport_code(name: str) -> int:
    """A transport as a number; 0 is none."""
    return _TRANSPORTS.index(name)


def transport_name(code: int) -> str:
    """Return the name of a transport's number. Raises WireError for an unknown number."""
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
