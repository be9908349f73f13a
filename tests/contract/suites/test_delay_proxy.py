"""The delay proxy: every byte late by the same, none lost or overtaken, throughput untouched."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from bench.scheduler.delay_proxy import DelayProxy, ProxyProcess

DELAY_S = 0.05


@pytest.fixture
def echo() -> Iterator[str]:
    """A server that sends back what it gets, and the end too."""
    server = socket.create_server(("127.0.0.1", 0))

    def serve(end: socket.socket) -> None:
        with end:
            while data := end.recv(1 << 16):
                end.sendall(data)

    def accept() -> None:
        while True:
            try:
                end, _ = server.accept()
            except OSError:
                return
            threading.Thread(target=serve, args=(end,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    yield f"127.0.0.1:{server.getsockname()[1]}"
    server.shutdown(socket.SHUT_RDWR)
    server.close()


def connect(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=30)


def round_trip_s(end: socket.socket) -> float:
    began = time.monotonic()
    end.sendall(b"x")
    assert end.recv(1) == b"x"
    return time.monotonic() - began


def read_all(end: socket.socket) -> bytes:
    parts = []
    while data := end.recv(1 << 20):
        parts.append(data)
    return b"".join(parts)


def test_a_byte_is_late_each_way(echo: str) -> None:
    with DelayProxy(echo, DELAY_S) as proxy, connect(proxy.address) as end:
        assert round_trip_s(end) >= 2 * DELAY_S
        proxy.delay_s = 0.0
        assert min(round_trip_s(end) for _ in range(20)) < DELAY_S


def test_much_that_is_sent_at_once_arrives_whole_and_is_not_late_many_times(echo: str) -> None:
    data = bytes(range(256)) * 40_000
    with DelayProxy(echo, DELAY_S) as proxy, connect(proxy.address) as end:
        began = time.monotonic()

        def send() -> None:
            for at in range(0, len(data), 100_000):
                end.sendall(data[at : at + 100_000])
            end.shutdown(socket.SHUT_WR)

        threading.Thread(target=send, daemon=True).start()
        assert read_all(end) == data
        # One delay per chunk would be over 5 s each way.
        assert 2 * DELAY_S <= time.monotonic() - began < 5


def test_an_end_travels_late_too_and_a_broken_target_breaks_the_connection(echo: str) -> None:
    with DelayProxy(echo, DELAY_S) as proxy, connect(proxy.address) as end:
        began = time.monotonic()
        end.shutdown(socket.SHUT_WR)
        assert end.recv(1) == b"" and time.monotonic() - began >= 2 * DELAY_S
    nobody = socket.create_server(("127.0.0.1", 0))
    address = f"127.0.0.1:{nobody.getsockname()[1]}"
    nobody.close()
    with DelayProxy(address) as proxy, connect(proxy.address) as end:
        assert end.recv(1) == b""


def test_the_process_delays_as_it_is_told(echo: str) -> None:
    proxy = ProxyProcess(echo)
    try:
        with connect(proxy.address) as end:
            round_trip_s(end)
            proxy.set_delay(DELAY_S * 1e3)
            # The order is under way; what was sent before it took effect is not late.
            deadline = time.monotonic() + 60
            while round_trip_s(end) < 2 * DELAY_S:
                assert time.monotonic() < deadline, "the delay never came"
    finally:
        proxy.close()
