"""A connection to a Redis, against one that says what a test wants, in pieces as small as a test wants."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
from typing import TYPE_CHECKING

import pytest

from quire_common.errors import ConfigError
from quire_kvstore.tiers.redis_address import RedisAddress
from quire_kvstore.tiers.redis_connection import ErrorReply, RedisConnection, RedisConnectionLost
from tests.redis_server import RedisServer, redis_server

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["redis_server"]
HELLO = b"+PONG\r\n"


@contextlib.contextmanager
def connection_to(
    answers: bytes, step: int = 1 << 20, pause_s: float = 0.0, timeout_s: float = 30.0
) -> Iterator[RedisConnection]:
    """A connection to a server that greets, and then says this whatever it is asked, `step` bytes at a time."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        gone = threading.Event()

        def speak() -> None:
            with listener.accept()[0] as peer, contextlib.suppress(OSError):
                peer.sendall(HELLO)
                for start in range(0, len(answers), step):
                    peer.sendall(answers[start : start + step])
                    gone.wait(pause_s)
                peer.shutdown(socket.SHUT_WR)
                gone.wait(60)

        speaker = threading.Thread(target=speak)
        speaker.start()
        connection = RedisConnection(RedisAddress("127.0.0.1", listener.getsockname()[1]), timeout_s)
        try:
            yield connection
        finally:
            gone.set()
            connection.close()
            speaker.join(60)


@pytest.mark.parametrize("step", [1, 3, 1 << 20])
def test_answers_parse_however_they_are_cut(step: int) -> None:
    value = bytes(range(256)) * 3
    said = b"+OK\r\n:42\r\n$-1\r\n-ERR no\r\n$768\r\n" + value + b"\r\n$4\r\n\r\n\r\n\r\n:7\r\n"
    with connection_to(said, step) as connection:
        into = memoryview(bytearray(768))
        assert (connection.read_reply(), connection.read_reply(), connection.read_reply()) == (b"OK", 42, None)
        refusal = connection.read_reply()
        assert isinstance(refusal, ErrorReply) and str(refusal) == "ERR no"
        assert connection.read_reply(into) == 768 and into == value
        assert connection.read_reply() == b"\r\n\r\n"
        assert connection.read_reply() == 7


def test_a_value_of_another_size_is_read_past() -> None:
    with connection_to(b"$5\r\nhello\r\n:1\r\n") as connection:
        into = memoryview(bytearray(4))
        assert connection.read_reply(into) == 5 and bytes(into) == bytes(4)
        assert connection.read_reply() == 1


@pytest.mark.parametrize(
    "said",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"$x\r\n",
        b":\r\n",
        b"*2\r\n:1\r\n:2\r\n",
        b"$3\r\nabcdef\r\n",
        b"$999999999\r\n",
        b"+" + b"x" * 9000,
        b"\x00" * 5000,
        b"",
    ],
)
def test_malformed_answer_is_a_lost_connection(said: bytes) -> None:
    with connection_to(said) as connection, pytest.raises(RedisConnectionLost):
        connection.read_reply()
        connection.read_reply()


def test_trickling_answer_times_out() -> None:
    """Each byte is in time; the whole is not."""
    with connection_to(b"+" + b"x" * 4000, step=1, pause_s=0.02, timeout_s=0.3) as connection:
        began = time.monotonic()
        with pytest.raises(RedisConnectionLost, match="longer than"):
            connection.read_reply()
        assert time.monotonic() - began < 10


def test_values_of_any_length_round_trip(redis_server: RedisServer) -> None:
    connection = RedisConnection(RedisAddress.parse(redis_server.url), 30)
    for size in (0, 1, 5000, 1 << 14, (1 << 21) + 7):
        value = memoryview(bytes(index % 251 for index in range(997)) * (size // 997 + 1))[:size]
        assert connection.execute([(b"SET", b"key", value, b"EX", b"60"), (b"STRLEN", b"key")]) == [b"OK", size]
        into = memoryview(bytearray(size))
        connection.send([(b"GET", b"key")])
        assert connection.read_reply(into) == size and into == value
    connection.close()


def test_database_and_password_are_sent(redis_server: RedisServer) -> None:
    port = redis_server.port
    one = RedisConnection(RedisAddress.parse(f"redis://127.0.0.1:{port}/1"), 30)
    two = RedisConnection(RedisAddress.parse(f"redis://127.0.0.1:{port}/2"), 30)
    assert one.execute([(b"SET", b"key", b"1")]) == [b"OK"] and two.execute([(b"GET", b"key")]) == [None]
    assert one.execute([(b"CONFIG", b"SET", b"requirepass", b"p@ss")]) == [b"OK"]
    with pytest.raises(RedisConnectionLost, match="does not let us in"):
        RedisConnection(RedisAddress.parse(f"redis://127.0.0.1:{port}"), 30)
    three = RedisConnection(RedisAddress.parse(f"redis://:p%40ss@127.0.0.1:{port}/1"), 30)
    assert three.execute([(b"GET", b"key")]) == [b"1"]
    for connection in (one, two, three):
        connection.close()


def test_redis_urls_are_parsed() -> None:
    parse = RedisAddress.parse
    assert parse("redis://h") == RedisAddress("h", 6379)
    assert parse("redis://u:p%2F@h:1/3") == RedisAddress("h", 1, "", 3, "u", "p/")
    assert parse("rediss://h:2?ssl_ca_certs=/ca.pem") == RedisAddress("h", 2, tls=True, ca_file="/ca.pem")
    assert parse("unix:///run/redis.sock?db=4") == RedisAddress(path="/run/redis.sock", db=4)
    assert "secret" not in str(parse("redis://u:secret@h"))


@pytest.mark.parametrize(
    "url",
    [
        "",
        "h:6379",
        "http://h",
        "redis://",
        "redis://h/x",
        "redis://h/-1",
        "redis://h:99999",
        "redis://h?x=1",
        "unix://",
    ],
)
def test_bad_redis_urls_are_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="redis_url") as caught:
        RedisAddress.parse(url)
    assert caught.value.code == "BAD_REDIS_URL" and caught.value.fix


def test_tls_is_asked_for_with_the_hosts_name() -> None:
    """A server that does not speak TLS, and one that nobody vouches for, are lost before a word is said."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def hang_up() -> None:
            with listener.accept()[0] as peer:
                assert peer.recv(1) == b"\x16", "the first byte of a TLS handshake"
                peer.sendall(b"-ERR\r\n")

        server = threading.Thread(target=hang_up)
        server.start()
        with pytest.raises(RedisConnectionLost) as caught:
            RedisConnection(RedisAddress.parse(f"rediss://127.0.0.1:{listener.getsockname()[1]}"), 30)
        assert isinstance(caught.value.__cause__, ssl.SSLError)
        server.join(60)
