"""What the relay of the chaos tests does to connections that are open."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from tests.tcp_relay import TcpRelay

SHORT_S, LIMIT_S = 0.2, 5.0


@pytest.fixture
def echo() -> Iterator[tuple[str, int]]:
    """The address of a server that says what it hears."""
    server = socket.create_server(("127.0.0.1", 0))

    def answer(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            while data := connection.recv(1024):
                connection.sendall(data)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=answer, args=(server.accept()[0],), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    yield ("127.0.0.1", server.getsockname()[1])
    server.shutdown(socket.SHUT_RDWR)
    server.close()


def test_what_is_held_comes_later_and_is_not_lost(echo: tuple[str, int]) -> None:
    with TcpRelay(echo) as relay, socket.create_connection(("127.0.0.1", relay.port), LIMIT_S) as near:
        near.sendall(b"one")
        assert near.recv(3) == b"one"
        relay.set_mode("held")
        near.sendall(b"two")
        near.settimeout(SHORT_S)
        with pytest.raises(TimeoutError):
            near.recv(3)
        relay.set_mode("pass")
        near.settimeout(LIMIT_S)
        assert near.recv(3) == b"two"


def test_what_comes_while_silent_is_lost(echo: tuple[str, int]) -> None:
    with TcpRelay(echo, "silent") as relay, socket.create_connection(("127.0.0.1", relay.port), LIMIT_S) as near:
        near.sendall(b"one")
        deadline = time.monotonic() + LIMIT_S
        while not relay.harmed and time.monotonic() < deadline:
            time.sleep(0.01)
        relay.set_mode("pass")
        near.sendall(b"two")
        assert near.recv(3) == b"two"


@pytest.mark.parametrize("reset", [False, True])
def test_hanging_up_ends_or_resets_open_connections(echo: tuple[str, int], reset: bool) -> None:
    with TcpRelay(echo) as relay, socket.create_connection(("127.0.0.1", relay.port), LIMIT_S) as near:
        near.sendall(b"one")
        assert near.recv(3) == b"one"
        assert relay.open == 1
        relay.hang_up(reset=reset)
        if reset:
            with pytest.raises(ConnectionResetError):
                near.recv(3)
        else:
            assert near.recv(3) == b""


def test_a_connection_that_both_ends_have_closed_is_open_no_more(echo: tuple[str, int]) -> None:
    with TcpRelay(echo) as relay:
        with socket.create_connection(("127.0.0.1", relay.port), LIMIT_S) as near:
            near.sendall(b"one")
            assert near.recv(3) == b"one"
        deadline = time.monotonic() + LIMIT_S
        while relay.open and time.monotonic() < deadline:
            time.sleep(0.01)
        assert relay.open == 0
