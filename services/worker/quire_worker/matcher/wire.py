"""The frames between the engine and the matcher's process. The `subject` of a frame is a mask slot, and its
`generation` is the sequence that has this slot.

OPEN      i64 position of the first output token; i32 lookahead; i32 number of output tokens; these tokens; the text of
          the grammar
TOKENS    rows of four int32: mask slot, generation, position, token
AWAIT     int32 position
OPENED    int32 microseconds that compiling took
FAILED    text: the cause
TOO_SLOW  text: the cause
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

_OPEN = struct.Struct("<qii")
TOKEN_COLUMNS = 4


class MatcherFrameKind(enum.IntEnum):
    """The kind of a frame. MASKED and CLOSE have no payload."""

    # from the engine
    SETUP = ProcessFrameKind.SETUP
    OPEN = 2
    """A sequence gets this mask slot: compile its grammar, replay its output, and write the mask of the next token."""
    TOKENS = 3
    """Sequences have sampled these tokens: write their next masks."""
    CLOSE = 4
    """The sequence has ended, and its mask slot is free."""
    AWAIT = 5
    """A step found the mask of this position missing: answer MASKED when it is there."""
    PING = ProcessFrameKind.PING
    # from the matcher
    READY = ProcessFrameKind.READY
    OPENED = 17
    """The first mask of the sequence is there."""
    FAILED = 18
    """The grammar failed; the sequence gets no more masks."""
    MASKED = 19
    """The awaited mask is there."""
    TOO_SLOW = 20
    """The grammar failed because its masks take too much processor time."""
    PONG = ProcessFrameKind.PONG


@dataclass(frozen=True, slots=True)
class OpenMessage:
    """The content of an OPEN frame."""

    mask_slot: int
    generation: int
    position: int
    """The position of the first output token."""
    output_ids: tuple[int, ...]
    grammar: str
    lookahead: int = 0
    """The most lookahead masks that the process may compute; see lookahead_grammar."""


def open_frame_bytes(output: int, grammar: int) -> int:
    """Return the size of an OPEN frame in bytes, for a number of output tokens and of bytes of grammar."""
    return FRAME_HEAD_BYTES + _OPEN.size + 4 * output + grammar


def pack_open(opened: OpenMessage) -> Frame:
    """Pack an OPEN frame."""
    ids = np.array(opened.output_ids, np.int32).tobytes()
    head = _OPEN.pack(opened.position, opened.lookahead, len(opened.output_ids))
    return Frame(MatcherFrameKind.OPEN, opened.generation, opened.mask_slot, head + ids + opened.grammar.encode())


def unpack_open(frame: Frame) -> OpenMessage:
    """Unpack an OPEN frame. Raises WireError if its payload is too short or not UTF-8."""
    try:
        position, lookahead, count = _OPEN.unpack_from(frame.payload)
        ids = np.frombuffer(frame.payload, np.int32, count, _OPEN.size)
        text = frame.payload[_OPEN.size + ids.nbytes :].decode()
    except (struct.error, ValueError) as error:
        raise WireError(f"an OPEN frame that cannot be read: {error}") from None
    return OpenMessage(frame.subject, frame.generation, position, tuple(ids.tolist()), text, lookahead)


def unpack_tokens(frame: Frame) -> Int32:
    """Unpack a TOKENS frame into its rows [N, 4]: mask slot, generation, position, token. Raises WireError for a
    payload of another shape."""
    column = frame.column()
    if len(column) % TOKEN_COLUMNS:
        raise WireError(f"a column of {len(column)} numbers in TOKENS")
    return column.reshape(-1, TOKEN_COLUMNS)
