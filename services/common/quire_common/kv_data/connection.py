"""DataConnection: frames over a socket, for either end. One thread at a time may use it. It does not know the meaning
of the frames.

The kernel keeps the time limits (SO_RCVTIMEO, SO_SNDTIMEO). One call sends a whole frame, or receives a head or a
payload, without returning to the interpreter, and its limit bounds all of it. So a peer that sends a byte now and then
holds a thread no longer than a silent peer. For a payload of 128 KiB to 1 MiB over TCP, a first call waits until it has
arrived, for the same limit at most, and a second call receives it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import socket
import struct
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire_common.kv_data.frame import (
    BODY_BYTES,
    FRAME_BYTES,
    HEAD_BYTES,
    HELLO_BYTES,
    DataConnectionError,
    Head,
    pack_hello,
    unpack_hello,
)
from quire_common.kv_data.lease_key import NONCE_BYTES
from quire_common.kv_data.seal import TAG_BYTES, Seals

if TYPE_CHECKING:
    from collections.abc import Sequence

_TIMEVAL = struct.Struct("@ll")
_FD = struct.Struct("@i")
_NO_TAG = bytes(TAG_BYTES)
# From here on it is worth two more calls to sleep until all is there, rather than wake up for each packet.
_MANY_PACKETS_BYTES = 128 << 10


@dataclass(slots=True)
class ReceivedFrame:
    """A frame's head as received. The head must not be trusted before `DataConnection.verify_head` has checked it.
    `number` is that of the head's tag; the payload's tag has the next one."""

    head: Head
    packed: bytes
    payload_tag: bytes
    head_tag: bytes
    number: int
    fds: list[int]

    def close_fds(self) -> None:
        """Close the file descriptors that came with the frame and that no handler has taken."""
        while self.fds:
            os.close(self.fds.pop())


class DataConnection:
    """One end of a connection. Call `server_handshake` or `client_handshake` first, once. Methods that send or receive
    raise DataConnectionError if the peer has gone, is too slow or breaks the protocol; after that, only `shut_down` and
    `close` may be called."""

    def __init__(self, sock: socket.socket, timeout_s: float, *, tunnelled: bool = False) -> None:
        """`timeout_s` limits each call that sends a frame or receives a head or a payload, and is set on the socket. A
        second such call follows if a frame is sent in part, or a head comes in part on a Unix socket. `tunnelled`:
        whether the bytes of this socket travel on to another host, so that no file descriptors can come with them."""
        self.sock = sock
        unix = sock.family == socket.AF_UNIX
        self.local = unix and not tunnelled
        self._timeout_s = timeout_s
        self._sent = 0
        self._received = 0
        self._nonces = (b"", b"")
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        value = _TIMEVAL.pack(int(timeout_s), int(timeout_s % 1 * 1e6))
        sock.settimeout(None)
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            sock.setsockopt(socket.SOL_SOCKET, option, value)
        if not unix:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def server_handshake(self) -> None:
        """Exchange nonces as the serving end, which sends its greeting first."""
        ours = secrets.token_bytes(NONCE_BYTES)
        self._send([pack_hello(ours)])
        self._nonces = (ours, self._exactly(NONCE_BYTES))

    def client_handshake(self) -> None:
        """Exchange nonces as the client, which receives and checks the server's greeting first."""
        ours = secrets.token_bytes(NONCE_BYTES)
        self._nonces = (unpack_hello(self._exactly(HELLO_BYTES)), ours)
        self._send([ours])

    def server_seals(self, lease_key: bytes) -> Seals:
        """Return the seals for frames of a lease, at the serving end."""
        return Seals.of_server(lease_key, *self._nonces)

    def client_seals(self, lease_key: bytes) -> Seals:
        """Return the seals for frames of a lease, at the client's end."""
        return Seals.of_client(lease_key, *self._nonces)

    def wait(self, timeout_s: float) -> bool:
        """Wait until there is something to receive, or the connection has ended; returns False if neither happened
        within `timeout_s`."""
        return bool(self._poll.poll(timeout_s * 1000))

    def send(self, head: Head, seals: Seals, payload: memoryview | bytes = b"", fds: Sequence[int] = ()) -> None:
        """Send one frame, with tags made with the lease's key, and on a Unix socket with descriptors. `head.length` is
        the payload's length; with 0, no payload is sent. Raises DataConnectionError if the peer has gone or does not
        read in time."""
        number = 2 * self._sent
        self._sent += 1
        payload_tag = seals.outgoing.tag(number + 1, payload) if head.length else _NO_TAG
        covered = head.pack() + payload_tag
        framed = covered + seals.outgoing.tag(number, covered)
        self._send([framed, payload] if head.length else [framed], fds)

    def receive(self) -> ReceivedFrame | None:
        """Receive the head of the next frame with its tags and, on a Unix socket, its file descriptor; the payload is
        left to `receive_payload`. The head must not be trusted before `verify_head` has checked it. Returns None if the
        peer closed the connection before the frame began. Raises DataConnectionError for a malformed head, whose
        descriptor is closed."""
        fds: list[int] = []
        data = self._head(fds)
        if not data:
            return None
        number = 2 * self._received
        self._received += 1
        try:
            head = Head.unpack(data[:HEAD_BYTES])
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise
        tags = data[HEAD_BYTES : HEAD_BYTES + TAG_BYTES], data[HEAD_BYTES + TAG_BYTES :]
        return ReceivedFrame(head, data[: HEAD_BYTES + TAG_BYTES], *tags, number, fds)

    def verify_head(self, frame: ReceivedFrame, seals: Seals) -> Head:
        """Return the frame's head once its tag is verified. Raises DataConnectionError if the head was not made with
        the lease's key."""
        if not seals.incoming.verify(frame.head_tag, frame.number, frame.packed):
            raise DataConnectionError("forged", "a head was not made with the lease's key")
        return frame.head

    def receive_payload(self, frame: ReceivedFrame, seals: Seals, into: memoryview) -> None:
        """Receive the payload of a verified head into `into`, which has its length (more than 0: an empty payload has
        no tag), and verify its tag. Raises DataConnectionError if it was not made with the lease's key. The bytes must
        not be trusted before this method returns."""
        self._fill(into)
        if not seals.incoming.verify(frame.payload_tag, frame.number + 1, into):
            raise DataConnectionError("forged", "a payload was not made with the lease's key")

    def shut_down(self) -> None:
        """Shut the socket down, from any thread. A thread that is sending or receiving then finds the connection
        ended."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket. May be called more than once."""
        self.sock.close()

    def _head(self, fds: list[int]) -> bytes:
        """Receive a head with its tags; on a Unix socket, append its descriptor to `fds`. Returns no bytes if the peer
        has ended the connection."""
        if not self.local:
            return self._exactly(FRAME_BYTES, may_end=True)
        # A descriptor comes with the first byte. More than one per frame are cut off, and closed, by the kernel.
        try:
            space = socket.CMSG_LEN(_FD.size)  # CMSG_SPACE would let two in
            data, ancillary, _, _ = self.sock.recvmsg(FRAME_BYTES, space, socket.MSG_CMSG_CLOEXEC | socket.MSG_WAITALL)
        except OSError as error:
            raise _broken(error) from error
        for level, kind, value in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds += [fd for (fd,) in _FD.iter_unpack(value[: len(value) - len(value) % _FD.size])]
        try:
            return data + self._exactly(FRAME_BYTES - len(data)) if data else b""
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise

    def _exactly(self, size: int, *, may_end: bool = False) -> bytes:
        """Receive exactly `size` bytes and return them. If the peer ends the connection before the first byte and
        `may_end` is true, returns no bytes. Raises DataConnectionError if the connection ends otherwise, or the bytes
        do not come in time."""
        data = bytearray(size)
        if size and not self._fill(memoryview(data), may_end=may_end):
            return b""
        return bytes(data)

    def _fill(self, into: memoryview, *, may_end: bool = False) -> bool:
        """Receive exactly as many bytes as `into` has, and return True. If the peer ends the connection before the
        first byte and `may_end` is true, return False. Raises DataConnectionError if it ends otherwise, or the bytes do
        not come in time."""
        try:
            got = self.sock.recv_into(into, len(into), self._await(len(into)))
        except OSError as error:
            raise _broken(error) from error
        if got == len(into):
            return True
        if got == 0 and may_end:
            return False
        # Cut short by the peer's end or by the time limit, both of which the next read would tell.
        raise DataConnectionError("slow" if got else "ended", f"{got} of {len(into)} bytes came")

    def _await(self, size: int) -> int:
        """For 128 KiB to 1 MiB over TCP or a tunnelled socket, wait until all `size` bytes have arrived, for the time
        limit at most. Returns the flags for receiving them: to wait for all, or after the time limit not to wait."""
        if self.local or not _MANY_PACKETS_BYTES <= size <= BODY_BYTES:
            return socket.MSG_WAITALL
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, size)
        came = self.wait(self._timeout_s)
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
        return socket.MSG_WAITALL if came else socket.MSG_DONTWAIT

    def _send(self, parts: Sequence[memoryview | bytes], fds: Sequence[int] = ()) -> None:
        """Send all parts, with the descriptors at the first byte. Raises DataConnectionError where the peer has gone,
        or does not read in time."""
        deadline = time.monotonic() + self._timeout_s
        left = [memoryview(part) for part in parts]
        try:
            while left:
                if fds:
                    sent = socket.send_fds(self.sock, left, list(fds))
                    fds = ()
                else:
                    sent = self.sock.sendmsg(left)
                while left and sent >= len(left[0]):
                    sent -= len(left.pop(0))
                if left:
                    left[0] = left[0][sent:]
                    if time.monotonic() > deadline:
                        raise DataConnectionError("slow", "the peer does not read")
        except OSError as error:
            raise _broken(error) from error


def _broken(error: OSError) -> DataConnectionError:
    return DataConnectionError("slow" if isinstance(error, BlockingIOError) else "ended", str(error))
