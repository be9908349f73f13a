"""A plain client of data connections, for tests that say what a transfer agent never would."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

from quire_common.kv_data.connection import DataConnection
from quire_common.kv_data.frame import FrameKind, Head
from quire_common.kv_data.lease_key import handle_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from quire_common.kv_data.connection import ReceivedFrame
    from quire_common.kv_data.seal import Seals

WAIT_S = 60.0


class DataClient:
    """A connection under one lease."""

    def __init__(self, address: tuple[str, int] | str, key: bytes, handle: bytes = b"") -> None:
        self.connection = DataConnection(dial(address), WAIT_S)
        self.connection.client_handshake()
        self.handle = handle or handle_of(key)
        self.seals: Seals = self.connection.client_seals(key)

    def send(
        self,
        kind: FrameKind,
        payload: bytes = b"",
        *,
        page: int = 0,
        offset: int = 0,
        last: bool = False,
        header: bytes = bytes(128),
        fds: Sequence[int] = (),
    ) -> None:
        head = Head(kind, self.handle, page, offset, len(payload), last, header)
        self.connection.send(head, self.seals, payload, fds)

    def arrived(self) -> ReceivedFrame | None:
        return self.connection.receive()

    def answer(self) -> tuple[Head, bytes]:
        frame = self.connection.receive()
        assert frame is not None, "the store has ended the connection"
        head = self.connection.verify_head(frame, self.seals)
        payload = bytearray(head.length)
        if head.length:
            self.connection.receive_payload(frame, self.seals, memoryview(payload))
        return head, bytes(payload)

    def refusal(self) -> str:
        head, payload = self.answer()
        assert head.kind is FrameKind.REFUSED
        return payload.decode()

    def __enter__(self) -> DataClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.connection.close()


def dial(address: tuple[str, int] | str) -> socket.socket:
    """TCP, or an abstract Unix socket."""
    if isinstance(address, tuple):
        return socket.create_connection(address, WAIT_S)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.connect("\0" + address)
    except OSError:
        sock.close()
        raise
    return sock


def ended(sock: socket.socket) -> bool:
    """The store lets go of a connection; what it has sent before is passed over."""
    sock.settimeout(WAIT_S)
    try:
        while sock.recv(1 << 16):
            pass
    except ConnectionError:
        pass
    return True
