"""Frames of a data connection. A frame is a head of fixed size, then a payload. This module knows nothing of sockets,
or of the effects of frames.

    head      kind u8 | flags u8 | zero u16 | page u32 | offset u64 | length u32 | zero u32 | handle 16 |
              page header 128                                              little-endian
    tags      of the payload 16 | of head and payload's tag 16             see seal.py
    payload   `length` bytes

The header of a page is part of the frame's head. So a payload is only body, and can be received directly into the
memory of the page's body.

    GET      payload: int32 indices of the lease's pages       -> PAGE ..., END, or REFUSED
    PUT      a part of a page's body, from `offset` on         -> for the last part TAKEN, or REFUSED
    DAMAGED  `page` came, and is not what its key says         -> END (`page`: 1 where the store finds it intact)

and on a Unix socket, where descriptors travel:

    MAP      the arena, to read from                           -> END and a descriptor, or REFUSED
    LEND     here is a descriptor of the writer's own memory   -> END, or REFUSED
    TAKE     `page` lies there, its body at `offset`           -> TAKEN, or REFUSED

Between two workers, the worker with the pages serves each page when it is filled:

    GET      as above                                          -> ALIVE or PAGE ..., END, or REFUSED
             on a Unix socket                                  -> ALIVE or SHOWN ..., END, or REFUSED
    ALIVE    more is to come, if not yet                       the answer goes on
    SHOWN    pages from `page` on lie where the payload says,
             in what MAP gave: u64 offset | page header, each  -> TAKEN, soon: all up to `page` have been taken
    DONE     nothing more is wanted of the lease               -> END, or REFUSED
    LOCATE   where pages from `page` on lie in the memory that
             the ticket names, as soon as there are any        -> ALIVE ..., PLACED (payload: int32 places), or REFUSED

    AGENT    the NIXL agent that makes the ring readable       -> PLACED (payload: u64 address of the ring, the agent's
                                                                  metadata), or REFUSED
    SHOW     as GET on a Unix socket, by way of that agent     -> ALIVE or SHOWN ..., END, or REFUSED

A page that was read from a place that PLACED names is valid when a later LOCATE or DONE has been answered, because the
lease was still valid then. A page that was read through an agent has its header beside it, and is valid if its checksum
is right.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire_common.kv_data.lease_key import HANDLE_BYTES, NONCE_BYTES
from quire_common.kv_data.seal import TAG_BYTES
from quire_common.pages import HEADER_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

VERSION = 1
# Bytes of a payload: what is sent at once, and the most that is taken. One end makes or checks the tag of a part while
# the other copies the one before: with parts as large as pages both would wait for each other.
BODY_BYTES = 1 << 20
MAX_PAYLOAD_BYTES = 4 << 20
_HEAD = struct.Struct(f"<BBHIQII{HANDLE_BYTES}s{HEADER_BYTES}s")
_PLACE = struct.Struct(f"<Q{HEADER_BYTES}s")
_HELLO = struct.Struct(f"<4sHH{NONCE_BYTES}s")
_MAGIC = b"QKVD"
HELLO_BYTES = _HELLO.size
HEAD_BYTES = _HEAD.size
FRAME_BYTES = HEAD_BYTES + 2 * TAG_BYTES
_NO_HEADER = bytes(HEADER_BYTES)
_LAST = 1


class DataConnectionError(Exception):  # the connection's end, not an error of the store's; whoever sees it falls back
    """A connection that cannot go on. `reason` is one of few words, for metrics."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


class FrameKind(enum.IntEnum):
    GET = 1
    PUT = 2
    DAMAGED = 3
    MAP = 4
    LEND = 5
    TAKE = 6
    DONE = 7
    LOCATE = 8
    AGENT = 9
    SHOW = 10
    PAGE = 16
    END = 17
    TAKEN = 18
    REFUSED = 19
    """The payload is the error's code, ASCII."""
    ALIVE = 20
    PLACED = 21
    SHOWN = 22


@dataclass(frozen=True, slots=True)
class Head:
    """The head of a frame. `handle` names the lease. `page` is the index of a page in the lease, `offset` the place of
    the payload in the page's body, and `length` the payload's length in bytes, unless the kind gives them another
    meaning (see the module). `last`: the page's last part."""

    kind: FrameKind
    handle: bytes
    page: int = 0
    offset: int = 0
    length: int = 0
    last: bool = False
    page_header: bytes = _NO_HEADER

    def pack(self) -> bytes:
        """Encode the head."""
        return _HEAD.pack(
            self.kind, _LAST * self.last, 0, self.page, self.offset, self.length, 0, self.handle, self.page_header
        )

    @classmethod
    def unpack(cls, data: bytes) -> Head:
        """Decode a head. Raises DataConnectionError for an unknown kind, bits that must be zero, or a payload of more
        than 4 MiB."""
        kind, flags, zero, page, offset, length, zeros, handle, page_header = _HEAD.unpack(data)
        if zero or zeros or flags & ~_LAST or kind not in _KINDS:
            raise DataConnectionError("garbage", f"no frame: kind {kind}, flags {flags}")
        if length > MAX_PAYLOAD_BYTES:
            raise DataConnectionError("oversized", f"a frame of {length} bytes; the most is {MAX_PAYLOAD_BYTES}")
        return cls(FrameKind(kind), handle, page, offset, length, bool(flags), page_header)


_KINDS = frozenset(FrameKind)


def pack_places(places: Sequence[tuple[int, bytes]]) -> bytes:
    """Encode the payload of SHOWN: for each page its offset and its header."""
    return b"".join(_PLACE.pack(*place) for place in places)


def unpack_places(payload: bytes | bytearray) -> list[tuple[int, bytes]]:
    """Decode the payload of SHOWN into offset and header of each page. Raises DataConnectionError for an empty payload
    or one of another length."""
    if not payload or len(payload) % _PLACE.size:
        raise DataConnectionError("garbage", f"{len(payload)} bytes are not places of pages")
    return list(_PLACE.iter_unpack(payload))


def pack_hello(nonce: bytes) -> bytes:
    """Encode the greeting that the serving end sends first, with its nonce."""
    return _HELLO.pack(_MAGIC, VERSION, 0, nonce)


def unpack_hello(data: bytes) -> bytes:
    """Return the nonce in the bytes that the serving end sends first, as `pack_hello` made them. Raises
    DataConnectionError if they are not the greeting of a data port of this version."""
    magic, version, zero, nonce = _HELLO.unpack(data)
    if (magic, version, zero) != (_MAGIC, VERSION, 0):
        raise DataConnectionError("garbage", "not a data port of version 1")
    return bytes(nonce)
