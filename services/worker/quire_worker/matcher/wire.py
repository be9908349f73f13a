"""Frames between the engine and its matcher. Their subject is a seat, their generation the sequence that has it.

OPEN      position of the sequence's first output token i64, number of output tokens i32, these, the grammar's text
TOKENS    int32 rows of four: seat, generation, position, token
AWAIT     int32: position
OPENED    int32: microseconds that compiling took
FAILED    the text of the cause
TOO_SLOW  the text of the cause
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from quire_worker.side_process.frames import FRAME_HEAD_BYTES, Frame, ProcessFrameKind, WireError

if TYPE_CHECKING:
    from quire_worker.arrays import Int32

_OPEN = struct.Struct("<qi")
TOKEN_COLUMNS = 4


class MatcherFrameKind(enum.IntEnum):
    """The content of a frame."""

    # from the engine
    SETUP = ProcessFrameKind.SETUP
    OPEN = 2
    """A sequence takes this seat: compile its grammar, feed it the output tokens, and leave the mask of the next."""
    TOKENS = 3
    """Sequences have sampled these tokens."""
    CLOSE = 4
    """The sequence has left its seat."""
    AWAIT = 5
    """A step found the mask of this position missing: say when it is there."""
    PING = ProcessFrameKind.PING
    # from the matcher
    READY = ProcessFrameKind.READY
    OPENED = 17
    """The seat has its first mask."""
    FAILED = 18
    """The sequence's grammar cannot go on; its seat has no more masks."""
    MASKED = 19
    """The mask that was awaited is there."""
    TOO_SLOW = 20
    """As FAILED: its masks take too much processor time."""
    PONG = ProcessFrameKind.PONG


@dataclass(frozen=True, slots=True)
class OpenMessage:
    """What OPEN says."""

    mask_slot: int
    generation: int
    position: int
    """The position of the first output token."""
    output_ids: tuple[int, ...]
    grammar: str


def open_frame_bytes(output: int, grammar: int) -> int:
    """The size of an OPEN frame with so many output tokens, and so many bytes of grammar."""
    return FRAME_HEAD_BYTES + _OPEN.size + 4 * output + grammar


def pack_open(opened: OpenMessage) -> Frame:
    """Pack an OPEN frame."""
    ids = np.array(opened.output_ids, np.int32).tobytes()
    head = _OPEN.pack(opened.position, len(opened.output_ids))
    return Frame(MatcherFrameKind.OPEN, opened.generation, opened.mask_slot, head + ids + opened.grammar.encode())


def unpack_open(frame: Frame) -> OpenMessage:
    """Unpack an OPEN frame; raises WireError."""
    try:
        position, count = _OPEN.unpack_from(frame.payload)
        ids = np.frombuffer(frame.payload, np.int32, count, _OPEN.size)
        text = frame.payload[_OPEN.size + ids.nbytes :].decode()
    except (struct.error, ValueError) as error:
        raise WireError(f"an OPEN frame that cannot be read: {error}") from None
    return OpenMessage(frame.subject, frame.generation, position, tuple(ids.tolist()), text)


def unpack_tokens(frame: Frame) -> Int32:
    """Unpack a TOKENS frame into its rows [N, 4]; raises WireError."""
    column = frame.column()
    if len(column) % TOKEN_COLUMNS:
        raise WireError(f"a column of {len(column)} numbers in TOKENS")
    return column.reshape(-1, TOKEN_COLUMNS)
