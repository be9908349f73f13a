"""A data connection in a gRPC stream. Each end is a socket, so both ends work as if they were connected directly.

At each end, two threads carry bytes between the stream and a socket pair, and do not look at them. The time limits of
both sides hold: if the stream takes no more bytes, the socket pair fills, and the sender waits.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from typing import TYPE_CHECKING

import grpc

from quire.v1 import worker_pb2, worker_pb2_grpc
from quire_common.channel import sync_channel
from quire_common.config import join_address
from quire_common.identity.callers import WORKER
from quire_common.kv_data.connection import DataConnection
from quire_common.kv_data.frame import DataConnectionError
from quire_common.telemetry.logs import get_logger
from quire_worker.kv_transfer.transports.data_link import PeerUnreachable, with_handshake

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from quire_common.config import ServiceConfig
    from quire_worker.kv_transfer.transports.data_link import Address

log = get_logger(__name__)
# As much as a socket pair holds by default, and as is asked of it.
PIECE_BYTES = 256 << 10
_BUFFER_BYTES = 1 << 20


def tunnel_ends() -> tuple[socket.socket, socket.socket]:
    """Make two connected sockets with large send buffers: one for a session or a link, the other for the stream that
    carries its bytes."""
    ends = socket.socketpair()
    for end in ends:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
    return ends


def read_pieces(end: socket.socket) -> Iterator[worker_pb2.PeerBytes]:
    """Yield the bytes that come out of a socket, as messages for the stream, until the socket ends."""
    with contextlib.suppress(OSError):
        while data := end.recv(PIECE_BYTES):
            yield worker_pb2.PeerBytes(data=data)


def write_pieces(pieces: Iterable[worker_pb2.PeerBytes], end: socket.socket) -> None:
    """Write the stream's messages into a socket until either ends, then shut the socket. An error of either also ends
    it; the error is logged at debug level and not raised."""
    try:
        for piece in pieces:
            end.sendall(piece.data)
    except (OSError, grpc.RpcError) as error:
        log.debug("a stream of a peer has ended", cause=type(error).__name__)
    finally:
        shut(end)


def shut(end: socket.socket) -> None:
    """Shut a socket both ways, so that threads that wait at either end notice."""
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)


class TunnelDialer:
    """Implements Dial. If the server does not listen yet, a call waits for it, as long as for an answer, unless
    `expect_server` has said that no server is starting."""

    def __init__(self, config: ServiceConfig) -> None:
        self._config = config
        self._wait_for_ready = True

    def expect_server(self, *, starting: bool) -> None:
        """Set whether calls from now on wait for a server that does not listen yet (`starting`), or fail at once if the
        connection is refused."""
        self._wait_for_ready = starting

    def __call__(self, address: Address, frame_s: float) -> DataConnection:
        """Start a gRPC call to the host and port, and a thread that carries its bytes; return the data connection in
        this call, after the handshake. `frame_s` is the longest silence on it. Raises PeerUnreachable if no greeting
        comes, and ValueError for the name of a Unix socket."""
        if isinstance(address, str):
            raise ValueError("gRPC is for hosts and ports")
        began_s = time.monotonic()
        host, port = address
        channel = sync_channel(join_address(host, port), self._config, WORKER)
        ours, theirs = tunnel_ends()

        def said() -> Iterator[worker_pb2.PeerBytes]:
            yield from read_pieces(theirs)
            call.cancel()  # the end of our side is the end of all: who waits for an answer here notices

        call = worker_pb2_grpc.PeerStub(channel).Connect(said(), wait_for_ready=self._wait_for_ready)

        def carry() -> None:
            """Write what the server sends into the socket until either ends, then end the call and the channel."""
            with contextlib.closing(channel), theirs:
                write_pieces(call, theirs)
                call.cancel()

        threading.Thread(target=carry, name="tunnel", daemon=True).start()
        try:
            return with_handshake(DataConnection(ours, frame_s, tunnelled=True))
        except DataConnectionError as error:
            raise PeerUnreachable(f"no greeting came over gRPC: {error}", began_s) from error
