"""Payloads of many packets over TCP, for which the receiver sleeps once: they come whole, or it is broken off."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from typing import TYPE_CHECKING

import pytest

from quire_common.kv_data.connection import DataConnection
from quire_common.kv_data.frame import BODY_BYTES, DataConnectionError, FrameKind, Head
from quire_common.kv_data.lease_key import handle_of

if TYPE_CHECKING:
    from collections.abc import Iterator

KEY = b"k" * 32
LIMIT_S = 0.3


@contextlib.contextmanager
def connected(limit_s: float = LIMIT_S) -> Iterator[tuple[DataConnection, DataConnection]]:
    """Who sends, and who receives within a limit."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far = listener.accept()[0]
    sender, receiver = DataConnection(near, 60.0), DataConnection(far, limit_s)
    greeting = threading.Thread(target=receiver.server_handshake)
    greeting.start()
    sender.client_handshake()
    greeting.join()
    try:
        yield sender, receiver
    finally:
        sender.close()
        receiver.close()


def received(receiver: DataConnection) -> bytes:
    seals = receiver.server_seals(KEY)
    frame = receiver.receive()
    assert frame is not None
    payload = bytearray(receiver.verify_head(frame, seals).length)
    receiver.receive_payload(frame, seals, memoryview(payload))
    return bytes(payload)


def framed(sender: DataConnection, payload: bytes) -> bytes:
    """A frame's bytes, as the sender would send them now."""
    seals = sender.client_seals(KEY)
    covered = Head(FrameKind.PUT, handle_of(KEY), length=len(payload)).pack() + seals.outgoing.tag(1, payload)
    return covered + seals.outgoing.tag(0, covered) + payload


@pytest.mark.parametrize("size", [1, 128 << 10, (128 << 10) + 1, BODY_BYTES, BODY_BYTES + 1, 2 << 20])
def test_payloads_of_all_sizes_arrive_in_a_row(size: int) -> None:
    payloads = [bytes([number]) * size for number in range(3)]
    with connected() as (sender, receiver):
        seals = sender.client_seals(KEY)

        def send() -> None:
            for payload in payloads:
                sender.send(Head(FrameKind.PUT, handle_of(KEY), length=size), seals, payload)

        sending = threading.Thread(target=send)
        sending.start()
        assert [received(receiver) for _ in payloads] == payloads
        sending.join()


def test_a_payload_may_come_in_pieces() -> None:
    with connected() as (sender, receiver):
        payload = bytes(range(256)) * (BODY_BYTES // 256)
        data = framed(sender, payload)

        def send() -> None:
            for start in range(0, len(data), 1 << 17):
                sender.sock.sendall(data[start : start + (1 << 17)])
                threading.Event().wait(0.01)

        sending = threading.Thread(target=send)
        sending.start()
        assert received(receiver) == payload
        sending.join()


@pytest.mark.parametrize("missing", [1, BODY_BYTES // 2, BODY_BYTES])
def test_who_stops_half_way_is_slow(missing: int) -> None:
    with connected() as (sender, receiver):
        data = framed(sender, bytes(BODY_BYTES))
        sending = threading.Thread(target=sender.sock.sendall, args=(data[:-missing],))
        sending.start()
        started = time.monotonic()
        with pytest.raises(DataConnectionError) as caught:
            received(receiver)
        assert caught.value.reason == "slow" and time.monotonic() - started > LIMIT_S / 2
        assert not receiver.wait(0), "what came is left: who looks takes it for a sign of life"
        sending.join()


def test_who_ends_half_way_is_noticed_at_once() -> None:
    with connected(limit_s=60.0) as (sender, receiver):
        sender.sock.sendall(framed(sender, bytes(BODY_BYTES))[: BODY_BYTES // 8])
        sender.close()
        started = time.monotonic()
        with pytest.raises(DataConnectionError):
            received(receiver)
        assert time.monotonic() - started < 30
