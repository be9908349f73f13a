"""A Generate call of the public gRPC port, frame by frame over a raw HTTP/2 connection: grpc's own clients write each
message as fast as they can."""

from __future__ import annotations

import asyncio
import contextlib
import struct
from types import TracebackType

from quire.v1 import inference_pb2

DATA, HEADERS, RESET, SETTINGS, GOAWAY = 0, 1, 3, 4, 7
_END_STREAM, _ACK, _END_HEADERS = 0x1, 0x1, 0x4
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_STREAM = 1


class RawCall:
    """A context. `opening` and `frames` are what a client sends; whoever has the context sends it, at its own pace."""

    def __init__(self, address: str, key: str, *, acknowledges: bool = True) -> None:
        host, port = address.split(":")
        self._where = host, int(port)
        self.opening = _PREFACE + _frame(SETTINGS, 0, 0, b"")
        self.opening += _frame(HEADERS, _END_HEADERS, _STREAM, _headers(address, key))
        self.heard: list[int] = []
        """Types of the frames that have come for the call or the connection's end."""
        self.changed = asyncio.Event()
        # What the server's settings are answered with, unless that would come to stand amid a frame sent byte by byte.
        self._acknowledges = acknowledges
        self.closed = False
        """By the server."""

    async def __aenter__(self) -> RawCall:
        self._reader, self._writer = await asyncio.open_connection(*self._where)
        self._listening = asyncio.create_task(self._listen())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listening.cancel()
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()

    async def send(self, data: bytes) -> None:
        """Raises OSError where the server has closed the connection."""
        self._writer.write(data)
        await self._writer.drain()

    async def _listen(self) -> None:
        try:
            while True:
                head = await self._reader.readexactly(9)
                length, kind, flags = int.from_bytes(head[:3], "big"), head[3], head[4]
                await self._reader.readexactly(length)
                if kind == SETTINGS and not flags & _ACK and self._acknowledges:
                    self._writer.write(_frame(SETTINGS, _ACK, 0, b""))
                if kind in (DATA, HEADERS, RESET, GOAWAY):
                    self.heard.append(kind)
                    self.changed.set()
        except (OSError, asyncio.IncompleteReadError):
            self.closed = True
            self.changed.set()


def message(text: str, max_tokens: int) -> bytes:
    """A GenerateRequest behind its length, as gRPC has it."""
    body = inference_pb2.GenerateRequest(text=text, max_tokens=max_tokens).SerializeToString()
    return struct.pack(">BI", 0, len(body)) + body


def data_frame(part: bytes, *, last: bool = False) -> bytes:
    """A part of the message, of at most 16 KiB."""
    return _frame(DATA, _END_STREAM if last else 0, _STREAM, part)


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload


def _headers(authority: str, key: str) -> bytes:
    """HPACK's plainest form: each name and value in full, to be kept in no table."""
    fields = (
        (":method", "POST"),
        (":scheme", "http"),
        (":path", "/quire.v1.Inference/Generate"),
        (":authority", authority),
        ("content-type", "application/grpc"),
        ("te", "trailers"),
        ("authorization", f"Bearer {key}"),
    )
    return b"".join(b"\0" + _text(name) + _text(value) for name, value in fields)


def _text(text: str) -> bytes:
    data = text.encode()
    if len(data) >= 127:
        raise ValueError("a longer text has a longer length")
    return bytes((len(data),)) + data
