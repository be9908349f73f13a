"""Frames of data connections between two ends of a socket pair: what gets through, and all that does not."""

from __future__ import annotations

import os
import socket
import struct
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from quire_common.kv_data.connection import DataConnection
from quire_common.kv_data.frame import FRAME_BYTES, HEAD_BYTES, MAX_PAYLOAD_BYTES, DataConnectionError, FrameKind, Head
from quire_common.kv_data.lease_key import connection_keys, handle_of
from quire_common.kv_data.seal import Seal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

KEY, OTHER = b"k" * 32, b"o" * 32
HANDLE = handle_of(KEY)


class Ends:
    """The store's end and a client's, and the client's bare socket."""

    def __init__(self, timeout_s: float = 60.0) -> None:
        near, far = socket.socketpair()
        self.raw = near
        self.client, self.store = DataConnection(near, 60.0), DataConnection(far, timeout_s)
        greeting = threading.Thread(target=self.store.server_handshake)
        greeting.start()
        self.client.client_handshake()
        greeting.join()
        self.seals = self.client.client_seals(KEY)
        self.store_seals = self.store.server_seals(KEY)

    def made(self, head: Head, payload: bytes = b"") -> bytes:
        """A frame's bytes, as the client would send them now."""
        near, far = socket.socketpair()
        with near, far:
            sender, self.client.sock = self.client.sock, near
            self.client.send(head, self.seals, payload)
            self.client.sock = sender
            return far.recv(1 << 20)

    def take(self) -> tuple[Head, bytes]:
        frame = self.store.receive()
        assert frame is not None
        head = self.store.verify_head(frame, self.store_seals)
        payload = bytearray(head.length)
        if payload:
            self.store.receive_payload(frame, self.store_seals, memoryview(payload))
        assert not frame.fds
        return head, bytes(payload)


@pytest.fixture
def make_ends() -> Iterator[Callable[..., Ends]]:
    made: list[Ends] = []

    def make(timeout_s: float = 60.0) -> Ends:
        made.append(Ends(timeout_s))
        return made[-1]

    yield make
    for pair in made:
        pair.client.close()
        pair.store.close()


@pytest.fixture
def ends(make_ends: Callable[..., Ends]) -> Ends:
    return make_ends()


def open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def broken(call: Callable[[], object]) -> str:
    with pytest.raises(DataConnectionError) as caught:
        call()
    return caught.value.reason


def test_what_is_sent_arrives(ends: Ends) -> None:
    first = Head(FrameKind.PUT, HANDLE, 3, 1 << 40, 5, True, bytes(range(128)))
    ends.client.send(first, ends.seals, b"hello")
    ends.client.send(Head(FrameKind.DAMAGED, HANDLE), ends.seals)
    assert ends.take() == (first, b"hello")
    assert ends.take() == (Head(FrameKind.DAMAGED, HANDLE), b"")
    ends.store.send(Head(FrameKind.END, HANDLE, 7), ends.store_seals)
    frame = ends.client.receive()
    assert frame is not None and ends.client.verify_head(frame, ends.seals).page == 7
    ends.client.close()
    assert ends.store.receive() is None


@pytest.mark.parametrize("place", [0, 4, 8, 16, 24, 39, 40, 100, HEAD_BYTES, HEAD_BYTES + 15, HEAD_BYTES + 16, -6])
def test_a_changed_bit_anywhere_is_noticed(ends: Ends, place: int) -> None:
    data = bytearray(ends.made(Head(FrameKind.PUT, HANDLE, 1, 0, 5), b"hello"))
    data[place if place >= 0 else FRAME_BYTES - 1] ^= 1
    ends.raw.sendall(data)
    assert broken(ends.take) in ("forged", "garbage")


def test_a_changed_payload_is_noticed(ends: Ends) -> None:
    data = bytearray(ends.made(Head(FrameKind.PUT, HANDLE, 1, 0, 5), b"hello"))
    data[-1] ^= 1
    ends.raw.sendall(data)
    assert broken(ends.take) == "forged"


def test_frames_come_once_and_in_order(ends: Ends, make_ends: Callable[..., Ends]) -> None:
    one, two = ends.made(Head(FrameKind.DAMAGED, HANDLE, 1)), ends.made(Head(FrameKind.DAMAGED, HANDLE, 2))
    ends.raw.sendall(two + one)
    assert broken(ends.take) == "forged"
    again = make_ends()
    again.raw.sendall(one)
    assert broken(again.take) == "forged", "and it is worth nothing on another connection"
    third = make_ends()
    frame = third.made(Head(FrameKind.DAMAGED, HANDLE))
    third.raw.sendall(frame + frame)
    third.take()
    assert broken(third.take) == "forged"


def test_a_frame_is_not_sent_back_as_an_answer(ends: Ends) -> None:
    frame = ends.made(Head(FrameKind.DAMAGED, HANDLE))
    ends.store.sock.sendall(frame)
    received = ends.client.receive()
    assert received is not None
    assert broken(lambda: ends.client.verify_head(received, ends.seals)) == "forged"


def test_another_leases_key_is_none(ends: Ends) -> None:
    ends.client.send(Head(FrameKind.DAMAGED, HANDLE), ends.client.client_seals(OTHER))
    assert broken(ends.take) == "forged"


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"GET / HTTP/1.1\r\n".ljust(FRAME_BYTES), "garbage"),
        (os.urandom(2) + b"\xff" * (FRAME_BYTES - 2), "garbage"),
        (struct.pack("<BBHIQII", 2, 0, 0, 0, 0, MAX_PAYLOAD_BYTES + 1, 0).ljust(FRAME_BYTES, b"\0"), "oversized"),
        (struct.pack("<BBHIQII", 2, 2, 0, 0, 0, 0, 0).ljust(FRAME_BYTES, b"\0"), "garbage"),
    ],
)
def test_what_is_no_frame_is_told_by_its_head(ends: Ends, data: bytes, reason: str) -> None:
    ends.raw.sendall(data)
    assert broken(ends.store.receive) == reason


def test_half_a_frame_is_none(ends: Ends) -> None:
    ends.raw.sendall(ends.made(Head(FrameKind.DAMAGED, HANDLE))[:100])
    ends.client.close()
    assert broken(ends.store.receive) in ("ended", "slow")


def test_who_drips_or_is_silent_is_not_waited_for(make_ends: Callable[..., Ends]) -> None:
    ends = make_ends(timeout_s=0.05)
    assert broken(ends.store.receive) == "slow"
    stop = threading.Event()
    frame = ends.made(Head(FrameKind.DAMAGED, HANDLE))

    def drip() -> None:
        for place in range(len(frame)):
            if stop.wait(0.01):
                return
            ends.raw.sendall(frame[place : place + 1])

    dripping = threading.Thread(target=drip)
    dripping.start()
    try:
        assert broken(ends.store.receive) == "slow"
    finally:
        stop.set()
        dripping.join()


def test_who_does_not_read_is_not_waited_for(make_ends: Callable[..., Ends]) -> None:
    ends = make_ends(timeout_s=0.05)
    body = memoryview(bytes(MAX_PAYLOAD_BYTES))

    def send_much() -> None:
        for _ in range(8):
            ends.store.send(Head(FrameKind.PAGE, HANDLE, length=len(body)), ends.store_seals, body)

    assert broken(send_much) == "slow"


def test_descriptors_that_nobody_asked_for_are_closed(ends: Ends) -> None:
    before = open_files()
    fd = os.memfd_create("test")
    ends.client.send(Head(FrameKind.LEND, HANDLE), ends.seals, fds=[fd, fd, fd])
    frame = ends.store.receive()
    assert frame is not None and len(frame.fds) <= 1
    frame.close_fds()
    with pytest.raises(DataConnectionError):
        socket.send_fds(ends.raw, [b"x" * FRAME_BYTES], [fd])
        ends.store.receive()
    os.close(fd)
    assert open_files() == before


def test_keys_differ_by_direction_connection_and_lease() -> None:
    keys = [
        *connection_keys(KEY, b"s" * 16, b"c" * 16),
        *connection_keys(KEY, b"s" * 16, b"d" * 16),
        *connection_keys(KEY, b"t" * 16, b"c" * 16),
        *connection_keys(OTHER, b"s" * 16, b"c" * 16),
    ]
    assert len(set(keys)) == 8 and {len(key) for key in keys} == {32}
    assert len({HANDLE, handle_of(OTHER), KEY[:16]}) == 3


def test_a_tag_is_gmac() -> None:
    """Known answer: NIST's GCM test case 13 (no data at all) with a 256-bit key of zeros."""
    assert Seal(bytes(32)).tag(0, b"").hex() == "530f8afbc74536b9a963b4f1c4cb738b"
