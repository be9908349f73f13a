"""One connection to a Redis, in its protocol (RESP2): it sends commands in pipelines and receives answers, and does not
copy values.

A value is sent from its own memory, and received into its final memory. This module knows nothing of pages, and is not
thread-safe. After a RedisConnectionLost, the connection cannot be used any more.
"""

from __future__ import annotations

import contextlib
import socket
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from quire_kvstore.tiers.redis_address import RedisAddress

# A word of this size or more is sent as it is, instead of being copied to where its command is put together.
_LONG_BYTES = 16 << 10
_BUFFER_BYTES = 64 << 10
_LONGEST_LINE = 4096


class RedisConnectionLost(Exception):  # one fact; the backend turns it into misses
    """The Redis is away or too slow, or breaks its protocol."""


class ErrorReply(Exception):  # an answer, not raised: one command's error says nothing of the others'
    """The error with which Redis answered a command."""


Argument = bytes | memoryview
Reply = int | bytes | ErrorReply | None


class RedisConnection:
    """A connection. `timeout_s` limits each wait for the socket to take or give bytes, and each answer as a whole,
    which may take up to twice as long (see `_receive_into`)."""

    def __init__(self, address: RedisAddress, timeout_s: float) -> None:
        """Connect, log in, select the database and ping (see `_handshake`). Raises RedisConnectionLost if Redis cannot
        be reached or refuses any of this, as it does while it loads its data."""
        try:
            self._socket = address.connect(timeout_s)
        except OSError as error:
            raise RedisConnectionLost(f"no connection to {address}: {error}") from error
        self._wait_all_flag = 0 if address.tls else socket.MSG_WAITALL
        self._buffer = memoryview(bytearray(_BUFFER_BYTES))
        self._begin = self._end = 0
        self._timeout_s = timeout_s
        self._deadline_s = 0.0
        try:
            self._handshake(address)
        except BaseException:
            self.close()
            raise

    def execute(self, commands: Sequence[Sequence[Argument]]) -> list[Reply]:
        """Send all commands, then read every answer. A command's own error is returned as its answer. Raises
        RedisConnectionLost as `send` and `read_reply` do."""
        self.send(commands)
        return [self.read_reply() for _ in commands]

    def send(self, commands: Sequence[Sequence[Argument]]) -> None:
        """Send commands in RESP2, without waiting for answers. The caller must then read one answer for each. Arguments
        of 16 KiB or more are sent from their own memory. Raises RedisConnectionLost if the connection breaks, or if the
        socket takes no byte for `timeout_s`; with TLS, also if one write takes longer, and each long argument is a
        write. A call as a whole has no time limit."""
        waiting = bytearray()
        try:
            for arguments in commands:
                waiting += b"*%d\r\n" % len(arguments)
                for argument in arguments:
                    waiting += b"$%d\r\n" % len(argument)
                    if len(argument) >= _LONG_BYTES:
                        self._socket.sendall(waiting)
                        self._socket.sendall(argument)
                        waiting = bytearray()
                    else:
                        waiting += argument
                    waiting += b"\r\n"
            self._socket.sendall(waiting)
        except OSError as error:
            raise RedisConnectionLost(f"sending failed: {error}") from error

    def read_reply(self, into: memoryview | None = None) -> Reply:
        """Read the next answer; its time limit begins with this call. A status or a value is returned as bytes, a
        number as an integer, a missing value as None, and an error as ErrorReply. With `into`, a value of exactly its
        size is received into it, and a value of another size is skipped; in both cases, the value's length is returned.
        Raises RedisConnectionLost as `_receive_into` does, for an array or another breach of the protocol, and for a
        value over 64 KiB without `into`."""
        self._deadline_s = time.monotonic() + self._timeout_s
        line = self._read_line()
        kind, rest = line[:1], line[1:]
        if kind == b"+":
            return rest
        if kind == b"-":
            return ErrorReply(rest.decode("utf-8", "replace"))
        number = _number(rest)
        if kind == b":":
            return number
        if kind != b"$":
            raise RedisConnectionLost(f"an answer begins with {kind!r}")
        if number < 0:
            return None
        if into is None:
            if number > _BUFFER_BYTES:
                raise RedisConnectionLost(f"a value of {number} bytes was not asked for")
            into = memoryview(bytearray(number))
            self._read_exactly(into)
            self._end_of_value()
            return bytes(into)
        if len(into) == number:
            self._read_exactly(into)
        else:
            self._skip(number)
        self._end_of_value()
        return number

    def close(self) -> None:
        """Close the socket; errors are ignored. Called by the thread that uses the connection, or when none does."""
        with contextlib.suppress(OSError):
            self._socket.close()

    def _handshake(self, address: RedisAddress) -> None:
        """Log in if there is a password, select the database unless it is 0, and ping. Raises RedisConnectionLost as
        `execute` does, and if Redis refuses a command."""
        commands: list[Sequence[Argument]] = []
        if address.password:
            user = [address.user.encode()] if address.user else []
            commands.append([b"AUTH", *user, address.password.encode()])
        if address.db:
            commands.append([b"SELECT", b"%d" % address.db])
        commands.append([b"PING"])
        for answer in self.execute(commands):
            if not isinstance(answer, bytes):
                raise RedisConnectionLost(f"{address} does not let us in: {answer}")

    def _read_line(self) -> bytes:
        """Receive up to the next CRLF and return the bytes before it; the CRLF is consumed. Raises RedisConnectionLost
        as `_receive_into` does, and for a line that does not end within 4,096 bytes."""
        while True:
            have = bytes(self._buffer[self._begin : min(self._end, self._begin + _LONGEST_LINE)])
            end = have.find(b"\r\n")
            if end >= 0:
                self._begin += end + 2
                return have[:end]
            if len(have) >= _LONGEST_LINE:
                raise RedisConnectionLost("an answer's first line does not end")
            self._receive()

    def _read_exactly(self, into: memoryview) -> None:
        """Fill `into` with the next bytes, from the buffer and then from the socket. Raises RedisConnectionLost as
        `_receive_into` does."""
        got = min(self._end - self._begin, len(into))
        into[:got] = self._buffer[self._begin : self._begin + got]
        self._begin += got
        while got < len(into):
            got += self._receive_into(into[got:], self._wait_all_flag)

    def _skip(self, count: int) -> None:
        """Receive and drop the next `count` bytes. Raises RedisConnectionLost as `_receive_into` does."""
        while count:
            if self._begin == self._end:
                self._receive()
            step = min(self._end - self._begin, count)
            self._begin += step
            count -= step

    def _end_of_value(self) -> None:
        """Read the CRLF that must follow a value. Raises RedisConnectionLost if something else follows, and as
        `_receive_into` does."""
        tail = memoryview(bytearray(2))
        self._read_exactly(tail)
        if bytes(tail) != b"\r\n":
            raise RedisConnectionLost("a value is longer than it said")

    def _receive(self) -> None:
        """Receive more bytes behind those in the buffer that were not read yet. Raises RedisConnectionLost as
        `_receive_into` does."""
        left = self._end - self._begin
        if left and self._begin:
            self._buffer[:left] = bytes(self._buffer[self._begin : self._end])
        self._begin, self._end = 0, left
        self._end += self._receive_into(self._buffer[left:])

    def _receive_into(self, memory: memoryview, flags: int = 0) -> int:
        """Receive at least one byte and at most as many as the memory holds; return how many. Raises
        RedisConnectionLost for an error, at the end of the connection, after a wait of `timeout_s` without a byte, and
        for bytes that come after the time limit of the answer. The limit is checked only when bytes have come, so an
        answer can take up to twice `timeout_s`."""
        try:
            count = self._socket.recv_into(memory, len(memory), flags)
        except OSError as error:
            raise RedisConnectionLost(f"receiving failed: {error}") from error
        if not count:
            raise RedisConnectionLost("the connection was closed")
        if time.monotonic() > self._deadline_s:
            raise RedisConnectionLost(f"an answer took longer than {self._timeout_s} s")
        return count


def _number(text: bytes) -> int:
    """Parse the number of an answer. Raises RedisConnectionLost if the text is no integer."""
    try:
        return int(text)
    except ValueError:
        raise RedisConnectionLost(f"an answer's number is {text[:20]!r}") from None
