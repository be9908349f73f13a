"""RunStream: one scheduler's Run call. A reader thread takes Grants in, the call's own thread sends Reports out."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from quire.v1 import worker_pb2
from quire_common.credit import Report, decode_grant, encode_report
from quire_common.credit.hello import check_hello, worker_hello_to_pb
from quire_common.errors import InvalidArgument, QuireError, as_quire_error
from quire_common.telemetry.logs import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import grpc

    from quire_worker.engine.run.run_loop import RunLoop

log = get_logger(__name__)
# A stream holds one of the server's few threads, so one that says nothing is ended.
HELLO_LIMIT_S = 10.0


class RunStream:
    """One Run call; ends with the call. `expect_peers` is called if the scheduler announces page moves between
    workers."""

    def __init__(
        self,
        loop: RunLoop,
        expect_peers: Callable[[], None],
        requests: Iterator[worker_pb2.Grant],
        context: grpc.ServicerContext,
    ) -> None:
        self._loop = loop
        self._expect_peers = expect_peers
        self._requests = requests
        self._context = context

    def reports(self) -> Iterator[worker_pb2.Report]:
        """Check the scheduler's hello, attach to the model thread in place of any scheduler that is attached, and yield
        the worker's hello and then Reports; a thread reads Grants meanwhile. Ends without an error when the Grants end.
        A Grant that cannot be decoded is logged, and ends the session with its error. Detaches at the end, also when
        the call is cancelled. Raises the error of a missing or wrong hello, or the QuireError that ended the
        session."""
        self._greet()
        session = self._loop.attach()
        self._context.add_callback(lambda: self._loop.detach(session))

        def read() -> None:
            """Pass Grants to the model thread until the stream ends, then detach. Any error, such as that of a Grant
            that cannot be decoded, is logged and ends the session, unless the scheduler has left."""
            error: QuireError | None = None
            try:
                for message in self._requests:
                    self._loop.granted(session, decode_grant(message), time.monotonic_ns() // 1000)
            except Exception as problem:
                if self._context.is_active():  # else the scheduler has left, and nobody is there to be told
                    error = as_quire_error(problem)
                    log.warning("a Grant was refused", code=error.code, error=error.message)
            self._loop.detach(session, error)

        threading.Thread(target=read, name="grants", daemon=True).start()
        try:
            for frame in session.frames():
                if isinstance(frame, Report):
                    yield encode_report(frame)
                else:
                    yield worker_pb2.Report(hello=worker_hello_to_pb(frame))
        finally:
            self._loop.detach(session)

    def _greet(self) -> None:
        """Read and check the scheduler's hello, and start the peers' transfer agent if the hello announces moves
        between workers. The call is cancelled if no frame comes within HELLO_LIMIT_S. Raises InvalidArgument if the
        stream ends before a frame or the first frame is no hello, and FailedPrecondition for another protocol
        version."""
        limit = threading.Timer(HELLO_LIMIT_S, self._context.cancel)
        limit.daemon = True
        limit.start()
        try:
            first = next(self._requests, None)
        finally:
            limit.cancel()
        if first is None or not first.HasField("hello"):
            raise InvalidArgument("HELLO_MISSING", "The first frame carries no hello.", "Send the hello first.")
        check_hello(first.hello)
        if first.hello.expects_peers:
            self._expect_peers()
