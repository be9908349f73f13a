"""DataLink: a data connection to a server of pages. The connection is made when it is first needed and kept for the
next move. One thread at a time may use it."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from typing import TYPE_CHECKING, NoReturn

from quire_common.errors import NotFound
from quire_common.kv.kv_client import TransferCancelled
from quire_common.kv_data.connection import DataConnection
from quire_common.kv_data.frame import DataConnectionError, FrameKind, Head
from quire_common.kv_data.lease_key import NO_KEY, handle_of
from quire_common.pages import PageCorrupt
from quire_worker.kv_transfer.transports.transport import TransportError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from quire_common.kv_data.connection import ReceivedFrame
    from quire_common.kv_data.seal import Seals

    Address = tuple[str, int] | str
    Dial = Callable[[Address, float], DataConnection]

CONNECT_S = 2
# Who is there refuses sooner, however loaded; ends that give up at the same time are one end's silence all the same.
_AT_ONCE_S = 1.0
_CONNECT_TIMEVAL = struct.pack("@ll", CONNECT_S, 0)
FRAME_S = 5.0
# Waiting for the other side takes FRAME_S and its pages at this rate in all; who is slower breaks, and another way is
# taken.
FLOOR_BYTES_PER_S = 50e6


def time_budget_s(size: int) -> float:
    """Return the seconds that the other side may take for an exchange of `size` bytes of pages."""
    return FRAME_S + size / FLOOR_BYTES_PER_S


class PeerUnreachable(DataConnectionError):
    """No connection was made. `silent`: the attempt took more than a second, so that probably nobody answered.
    Otherwise it failed at once, as if the connection was refused."""

    def __init__(self, text: str, began_s: float) -> None:
        super().__init__("unreached", text)
        self.silent = time.monotonic() - began_s > _AT_ONCE_S


class Exchange:
    """The frames of one lease on a connection, about pages of `size` bytes in all. The other side has a time budget for
    the whole exchange; time that the engine takes does not count. Raises DataConnectionError, also if the budget is
    used up."""

    def __init__(self, connection: DataConnection, lease_key: bytes, size: int = 0) -> None:
        self.connection = connection
        self.seals: Seals = connection.client_seals(lease_key)
        self._handle = handle_of(lease_key)
        self.set_time_budget(size)

    def set_time_budget(self, size: int) -> None:
        """From now on, allow the other side the time for `size` bytes. Time spent before does not count."""
        self._left_s = time_budget_s(size)

    def send(
        self,
        kind: FrameKind,
        payload: memoryview | bytes = b"",
        *,
        page: int = 0,
        offset: int = 0,
        last: bool = False,
        page_header: bytes = bytes(128),
        fds: Sequence[int] = (),
    ) -> None:
        """Send one frame under the lease, authenticated with its key. For a part of a page, `page`, `offset` and `last`
        say which page, from which byte on, and whether the page ends with the part. Raises DataConnectionError if the
        connection breaks, or if the time budget was used up before."""
        head = Head(kind, self._handle, page, offset, len(payload), last, page_header)
        started = self._in_time()
        self.connection.send(head, self.seals, payload, fds)
        self._spent_since(started)

    def receive_frame(self, *kinds: FrameKind) -> ReceivedFrame:
        """Wait for the next frame's head, which must be genuine and of one of these kinds. Raises NotFound for a
        refusal, even for one that was made without a key, and DataConnectionError for anything else, after closing the
        descriptors that came. The payload, if any, is still to be received."""
        started = self._in_time()
        frame = self.connection.receive()
        self._spent_since(started)
        if frame is None:
            raise DataConnectionError("ended", "the other side has ended the connection")
        try:
            head = self._verify_head(frame)
            if head.kind is FrameKind.REFUSED:
                self._refused(frame)
            if head.kind not in kinds:
                raise DataConnectionError("garbage", f"{head.kind.name} is no answer to this")
        except BaseException:
            frame.close_fds()
            raise
        return frame

    def receive_payload(self, frame: ReceivedFrame, into: memoryview) -> None:
        """Receive the payload of a head that has arrived, into memory of its length. Raises DataConnectionError if the
        connection breaks, or if the time budget was used up before."""
        started = self._in_time()
        self.connection.receive_payload(frame, self.seals, into)
        self._spent_since(started)

    def _verify_head(self, frame: ReceivedFrame) -> Head:
        """Verify that the head was made with the lease's key; raises DataConnectionError if not. A refusal that was
        made without a key is accepted too: it does no more than the connection's end would. The rest of the exchange is
        then verified without a key."""
        if frame.head.kind is FrameKind.REFUSED:
            with contextlib.suppress(DataConnectionError):
                return self.connection.verify_head(frame, self.seals)
            self.seals = self.connection.client_seals(NO_KEY)
        return self.connection.verify_head(frame, self.seals)

    def _in_time(self) -> float:
        """Return the present monotonic time. Raises DataConnectionError if the time budget is used up. It is called
        before each wait, and so data that has arrived counts, however late it came."""
        if self._left_s < 0:
            raise DataConnectionError("slow", "the other side takes too long over these pages")
        return time.monotonic()

    def _spent_since(self, started: float) -> None:
        """Subtract the time since `started`, a monotonic time in seconds, from the time budget."""
        self._left_s -= time.monotonic() - started

    def _refused(self, frame: ReceivedFrame) -> NoReturn:
        """Receive the code of a refusal, which is the frame's payload, and raise NotFound with it. The connection's own
        time limit applies, not the exchange's."""
        code = bytearray(frame.head.length)
        if code:
            self.connection.receive_payload(frame, self.seals, memoryview(code))
        raise NotFound(code.decode("ascii", "replace"), "Pages are refused on a data connection.", "It is a miss.")


class DataLink:
    """A connection to one address at a time. `frame_s` is the longest that the other side may be silent within an
    exchange. `dial` makes connections, as `connect` does."""

    def __init__(self, frame_s: float = FRAME_S, dial: Dial | None = None) -> None:
        self._frame_s = frame_s
        self._dial = dial
        self._connection: DataConnection | None = None
        self._address: Address = ""
        self._lock = threading.Lock()
        self._is_aborted = False

    @contextlib.contextmanager
    def exchange(self, address: Address, key: bytes, size: int = 0) -> Iterator[Exchange]:
        """Context manager: yield an exchange with this address under a lease's key, on the kept connection or a new
        one. `size`: the bytes of all its pages, which set its time budget. Connection errors become TransportError.
        After `abort`, a new connection is closed again, and TransferCancelled is raised; an exchange that is under way
        gets a TransportError. An exception inside closes the connection, except NotFound and PageCorrupt: after these
        it stays open, and the caller closes it if frames are still to come."""
        try:
            yield Exchange(self._connected(address), key, size)
        except (NotFound, PageCorrupt):
            raise
        except PeerUnreachable as error:
            raise TransportError(str(error), silent=error.silent, unreached=True) from error
        except (DataConnectionError, OSError) as error:
            silent = self._is_silent(error)
            self.close()
            raise TransportError(str(error), silent=silent) from error
        except BaseException:
            self.close()
            raise

    def abort(self) -> None:
        """End the connection from another thread, so that a waiting thread notices. Connections that the link makes
        later are closed at once. A connection that is being made is not interrupted: it is closed once it is made."""
        with self._lock:
            self._is_aborted = True
            if self._connection is not None:
                self._connection.shut_down()

    def adopt_connection(self, address: Address, connection: DataConnection) -> None:
        """Use a connection to this address that another link has handed over. Must be called before anything else."""
        self._address, self._connection = address, connection

    def release_connection(self) -> tuple[Address, DataConnection] | None:
        """Hand the connection, with its address, to the caller; no exchange may be under way. Returns None if there is
        no connection, or if the link was aborted; then the connection is closed."""
        with self._lock:
            connection, self._connection = self._connection, None
        if connection is None:
            return None
        if self._is_aborted:
            connection.close()
            return None
        return self._address, connection

    def close(self) -> None:
        """Shut and close the connection, if there is one; a thread that waits on it notices. A later exchange makes
        another. Idempotent."""
        with self._lock:
            connection, self._connection = self._connection, None
        if connection is not None:
            connection.shut_down()  # who waits for its end on another thread notices
            connection.close()

    def _connected(self, address: Address) -> DataConnection:
        """Return the kept connection, if it leads to this address and the other side has not ended it; else close it
        and make a new one. Raises TransferCancelled after `abort`, once a connection was made, and the errors of
        `connect`."""
        if self._connection is not None:
            # Between moves nothing is to come: what is there is the other side's end.
            if address == self._address and not self._connection.wait(0):
                return self._connection
            self.close()
        connection = (self._dial or connect)(address, self._frame_s)
        with self._lock:
            self._connection, self._address = connection, address
            if self._is_aborted:
                raise TransferCancelled
        return connection

    def _is_silent(self, error: Exception) -> bool:
        """Whether the error means that nothing came in time: a TimeoutError, or the reason `slow` (a time limit or the
        time budget) while there is no connection or nothing waits to be read. A connection that has ended is not
        silent."""
        if isinstance(error, DataConnectionError) and error.reason == "slow":
            return self._connection is None or not self._connection.wait(0)
        return isinstance(error, TimeoutError)


def connect(address: Address, frame_s: float = FRAME_S) -> DataConnection:
    """Make a connection within CONNECT_S (for each address of a host name), and greet, where `frame_s` is the longest
    silence; a string is the name of an abstract Unix socket. Raises PeerUnreachable if it is refused or, over TCP, for
    any OSError, failed greeting or host name that no resolver takes; DataConnectionError or OSError if a Unix socket's
    owner is there and says nothing."""
    if isinstance(address, str):
        return _connect_unix(address, frame_s)
    began_s = time.monotonic()
    try:
        return with_handshake(DataConnection(socket.create_connection(address, CONNECT_S), frame_s))
    except (DataConnectionError, OSError, UnicodeError) as error:
        raise PeerUnreachable(str(error), began_s) from error


def with_handshake(connection: DataConnection) -> DataConnection:
    """Greet on a connection that has just been made, and return it ready for use. If that fails, closes it and raises
    the error."""
    try:
        connection.client_handshake()
    except BaseException:
        connection.close()
        raise
    return connection


def _connect_unix(name: str, frame_s: float) -> DataConnection:
    """Connect to an abstract Unix socket and greet. Raises PeerUnreachable if nobody listens there, and OSError if its
    queue stays full for CONNECT_S. The errors of the greeting pass through."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # A socket with a timeout of Python's would not wait where others are in the queue.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _CONNECT_TIMEVAL)
        sock.connect("\0" + name)
    except ConnectionRefusedError as error:
        sock.close()
        raise PeerUnreachable(str(error), time.monotonic()) from error
    except BaseException:
        sock.close()
        raise
    return with_handshake(DataConnection(sock, frame_s))
