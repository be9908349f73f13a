"""Frames between a service and its child process, and the limits that a child puts on itself.

A frame is a JSON message and, behind it, bytes that are no JSON: text or numbers, which JSON would make larger and
slower to read.
"""

from __future__ import annotations

import json
import resource
import signal
import struct
from typing import Any, BinaryIO, NamedTuple

HEADER = struct.Struct(">II")
"""The lengths of the message and of the payload."""


class Frame(NamedTuple):
    """A message that was received, with its payload."""

    message: dict[str, Any]
    payload: bytes = b""


def framed(message: dict[str, Any], payload_bytes: int = 0) -> bytes:
    """Return the frame of a message up to its payload, which has so many bytes. The JSON is ASCII, so that any string
    can travel."""
    body = json.dumps(message).encode()
    return HEADER.pack(len(body), payload_bytes) + body


def read_frame(stream: BinaryIO) -> Frame | None:
    """Read one frame, blocking; None at the end of the stream, also in the middle of a frame. Raises ValueError for a
    message that is not JSON. The lengths that a frame tells are not limited."""
    header = stream.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    length, payload_bytes = HEADER.unpack(header)
    body = stream.read(length)
    payload = stream.read(payload_bytes)
    if len(body) < length or len(payload) < payload_bytes:
        return None
    return Frame(json.loads(body), payload)


def write_frame(stream: BinaryIO, message: dict[str, Any], payload: bytes = b"") -> None:
    """Write one frame, and flush it."""
    stream.write(framed(message, len(payload)))
    stream.write(payload)
    stream.flush()


def limit_process(memory_bytes: int) -> None:
    """Limit this process: it may write no files and no core, and map at most `memory_bytes`. It ignores SIGINT: the
    terminal's interrupt is left to the parent. Raises ValueError if the hard limit of the memory is lower already and
    this user may not raise it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
