"""Length-framed JSON between the service and a child process, and the limits that a child puts on itself."""

from __future__ import annotations

import json
import resource
import signal
import struct
from typing import Any, BinaryIO

LENGTH = struct.Struct(">I")


def framed(message: dict[str, Any]) -> bytes:
    """Return the frame of a message: ASCII JSON, so that any string can travel."""
    body = json.dumps(message).encode()
    return LENGTH.pack(len(body)) + body


def read_frame(stream: BinaryIO) -> dict[str, Any] | None:
    """Read one message; None at the end of the stream."""
    header = stream.read(LENGTH.size)
    if len(header) < LENGTH.size:
        return None
    loaded: dict[str, Any] = json.loads(stream.read(LENGTH.unpack(header)[0]))
    return loaded


def write_frame(stream: BinaryIO, message: dict[str, Any]) -> None:
    """Write one message, and flush it."""
    stream.write(framed(message))
    stream.flush()


def limit_process(memory_bytes: int) -> None:
    """Let this process write no files and no core, and map so much memory at most. The terminal's interrupt is left to
    the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
