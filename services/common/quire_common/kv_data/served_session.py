"""ServedSession: the serving end of a data connection, from its greeting to its end, on a thread of its own.

Until a frame is verified with the key of a lease, it changes nothing; it only takes time and the thread, both of which
are bounded. A malformed or unauthentic frame ends the connection. ServedSession does not know what a lease gives access
to.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Generic, TypeVar

from quire_common.errors import QuireError
from quire_common.kv_data.frame import DataConnectionError, FrameKind, Head
from quire_common.kv_data.lease_key import NO_KEY

if TYPE_CHECKING:
    from collections.abc import Callable

    from quire_common.kv_data.connection import DataConnection, ReceivedFrame
    from quire_common.kv_data.seal import Seals

L = TypeVar("L")


class ServedSession(ABC, Generic[L]):
    """One session; `run` is the main function of its thread. `authenticated`: the peer has proved that it knows the key
    of a lease. `busy`: the session is not waiting for a request. `goes_on_refused`: the connection goes on after a
    refused request."""

    goes_on_refused: bool

    def __init__(self, connection: DataConnection, idle_s: float) -> None:
        """`idle_s`: the longest that an authenticated session may wait for its next request."""
        self._connection = connection
        self._idle_s = idle_s
        self.authenticated = False
        self.busy = False
        self._handlers: dict[FrameKind, Callable[[ReceivedFrame, Seals, L], None]] = {}
        """What answers which requests. Handlers may raise QuireError, which is a refusal, and DataConnectionError."""

    def run(self) -> None:
        """Serve requests until the peer ends the connection, until an authenticated peer is idle for longer than
        `idle_s`, until the peer breaks the protocol or exceeds the connection's time limit, or until a refusal that
        ends the session (see `_answer`: that of an unknown lease always does). `_on_broken` is told of a fault, but not
        of a connection that the peer or `stop` ended between frames; an end inside a frame may count as a fault. Then
        close the connection and call `_on_end`, whatever happened; any other exception of a handler passes on. Runs in
        the session's own thread."""
        try:
            self._connection.server_handshake()
            while self._serve_next():
                pass
        except DataConnectionError as error:
            if error.reason != "ended":
                self._on_broken(error)
        finally:
            self._connection.close()
            self._on_end()

    def stop(self) -> None:
        """End the session; called from another thread."""
        self._connection.shut_down()

    def abandon(self) -> None:
        """Close the connection of a session that is not served."""
        self._connection.close()

    @abstractmethod
    def _admit(self, frame: ReceivedFrame) -> tuple[Seals, L | QuireError]:
        """Return the seals of a verified frame (see `_verify`), with its lease or the error of a lease that is refused.
        Raises QuireError for a lease that was never known, and DataConnectionError for a frame that is not genuine."""

    @abstractmethod
    def _on_broken(self, error: DataConnectionError) -> None:
        """Handle the end of the connection by a fault."""

    def _on_end(self) -> None:
        """Clean up after the end of the connection."""

    def _verify(self, frame: ReceivedFrame, seals: Seals) -> None:
        """Verify the frame's head, and note that the peer is authenticated. Raises DataConnectionError unless it was
        made with these seals' key."""
        self._connection.verify_head(frame, seals)
        self.authenticated = True

    def _end(self, head: Head, seals: Seals, page: int = 0) -> None:
        """Send END, the last frame of an answer, with `page` as its number."""
        self._connection.send(Head(FrameKind.END, head.handle, page), seals)

    def _serve_next(self) -> bool:
        """Wait for one request and answer it. An authenticated peer may be idle for `idle_s`, any other for the
        connection's time limit. File descriptors that the handler has not taken are closed. Returns whether the
        connection goes on; False also when an authenticated peer was idle for too long, or the peer has closed the
        connection. Raises DataConnectionError if another peer was idle for too long, for a head that is malformed, cut
        off or too slow, and for a connection that is reset; and as `_answer` does."""
        self.busy = False
        if self.authenticated and not self._connection.wait(self._idle_s):
            return False
        frame = self._connection.receive()
        if frame is None:
            return False
        self.busy = True
        try:
            return self._answer(frame)
        finally:
            frame.close_fds()

    def _answer(self, frame: ReceivedFrame) -> bool:
        """Verify a request and let the handler of its kind answer it. A QuireError is sent as a refusal with its code,
        under no key if the lease was never known. Returns whether the connection goes on: not after an unknown lease,
        and after another refusal only with `goes_on_refused`. Raises DataConnectionError for a frame that is not
        genuine, or of a kind without a handler."""
        try:
            seals, lease = self._admit(frame)
        except QuireError as error:
            # There is no key to make a frame with: this one is made with none, and proves nothing.
            self._refuse(frame.head, self._connection.server_seals(NO_KEY), error)
            return False
        try:
            if isinstance(lease, QuireError):
                raise lease
            handler = self._handlers.get(frame.head.kind)
            if handler is None:
                raise DataConnectionError("garbage", f"{frame.head.kind.name} is none of this path's")
            handler(frame, seals, lease)
        except QuireError as error:
            self._refuse(frame.head, seals, error)
            return self.goes_on_refused
        return True

    def _refuse(self, head: Head, seals: Seals, error: QuireError) -> None:
        code = error.code.encode()
        self._connection.send(Head(FrameKind.REFUSED, head.handle, head.page, length=len(code)), seals, code)
