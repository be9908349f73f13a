"""ProcessLink: keeps a process beside the engine running, and passes frames to and from it. It does not know the
effects of the frames.

One thread starts the process, reads from it, and starts another when it ends or hangs. Each process with its frames is
one *incarnation*: a frame for one incarnation is never sent to a later one. The first has the number 1, and each
ProcessLost ends one. A link that buffers while restarting makes the next process's socket early. If the system refuses
this socket, the next incarnation refuses all frames, and ends without a process.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire_common.telemetry.logs import get_logger
from quire_worker.side_process.frames import Frame, FrameReader, ProcessFrameKind

if TYPE_CHECKING:
    import enum
    from collections.abc import Callable, Mapping, Sequence

log = get_logger(__name__)
RECEIVE_BYTES = 1 << 18
SEND_BYTES = 1 << 18
MAX_BACKLOG_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class LinkTimeouts:
    """Time limits of a process. Silence is counted in unanswered pings, not in seconds. So a worker that was itself
    stopped for a while does not take its process for hung."""

    ping_s: float = 0.5
    silent_pings: int = 10
    start_pings: int = 120
    first_backoff_s: float = 0.1
    max_backoff_s: float = 5.0
    steady_s: float = 10.0
    """A process that lived so long did not fail to start: the backoff begins anew."""
    stop_s: float = 3.0


DEFAULT_TIMEOUTS = LinkTimeouts()


@dataclass(frozen=True, slots=True)
class ProcessLost:
    """Stands in the queue of frames for an incarnation that has ended: its process has ended and lost its state, or it
    had no process, and its frames were not read. Later frames come from the next incarnation."""

    had_process: bool = True
    """False: the system refused its socket, or the start of its process."""


@dataclass(frozen=True, slots=True)
class ProcessKind:
    """The names of a kind of process, and the bounds of its frames."""

    name: str
    """For the log: `the transfer agent`."""
    command: tuple[str, ...]
    frames: type[enum.IntEnum]
    thread: str
    """The name of the link's thread."""
    on_lost: Callable[[], None]
    """Called by the link's thread, for a metric, after each process that ended, was ended or failed to start, but not
    for an incarnation without a process, and not once the link closes. Its errors are logged."""
    buffers_while_restarting: bool = False
    """Whether `send` buffers frames for the next process as soon as one is lost. Otherwise it refuses frames until the
    next process starts."""


class ProcessLink:
    """Only the model thread calls `take_frame` and `give_up`; any thread may call `send`, and one calls `close` at the
    end. The link's own thread calls `on_frames` when there is a frame to take, and `on_ping` with each ping. `fds` are
    descriptors that every process inherits, by the flags that name them. The constructor raises OSError or RuntimeError
    if the system has no file descriptor or thread left."""

    def __init__(
        self,
        kind: ProcessKind,
        setup: Frame,
        fds: Mapping[str, int],
        on_frames: Callable[[], None],
        timeouts: LinkTimeouts = DEFAULT_TIMEOUTS,
        on_ping: Callable[[], None] = lambda: None,
    ) -> None:
        self._kind = kind
        self._setup = setup
        self._fds = fds
        self._on_frames = on_frames
        self._timeouts = timeouts
        self._on_ping = on_ping
        self._inbox: deque[Frame | ProcessLost] = deque()
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._incarnation = 1
        self._backlog = bytearray()
        self._giving_up = ""
        self._closing = False
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._child: subprocess.Popen[bytes] | None = None
        self._had_process = False
        self._thread = threading.Thread(target=self._main, name=kind.thread, daemon=True)
        self._first: tuple[socket.socket, socket.socket] | None = None
        try:
            self._first = self._connect()
            self._thread.start()
        except BaseException:
            for unused in self._first or ():
                unused.close()
            os.close(self._wake_fd)
            raise

    @property
    def pid(self) -> int | None:
        """The process's id; None while there is no process."""
        child = self._child
        return None if child is None else child.pid

    def send(self, incarnation: int, frame: Frame) -> bool:
        """Send a frame to the process of this incarnation, now or when its socket has room; returns False if that
        process is gone, was given up, or cannot take frames yet. True does not mean that the frame arrives. Never
        blocks. If more than MAX_BACKLOG_BYTES then wait to be sent, the process is replaced."""
        data = frame.pack()
        with self._lock:
            if self._socket is None or incarnation != self._incarnation or self._giving_up:
                return False
            sent = 0 if self._backlog else _try_send(self._socket, data)
            if sent < len(data):
                self._backlog += data[sent:]
                if len(self._backlog) > MAX_BACKLOG_BYTES:
                    self._giving_up = "it does not read"
                self._wake_thread()
        return True

    def take_frame(self) -> Frame | ProcessLost | None:
        """Return the next frame from the process, or ProcessLost if an incarnation has ended; None if nothing has
        come."""
        return self._inbox.popleft() if self._inbox else None

    def give_up(self, incarnation: int, why: str) -> None:
        """Have this incarnation's process killed and replaced, since it misbehaves; `why` is logged. No effect on a
        later one, or on one that is given up already."""
        with self._lock:
            if incarnation == self._incarnation and not self._giving_up:
                self._giving_up = why
                self._wake_thread()

    def close(self) -> None:
        """End the process and the thread, and wait for both. The process has `stop_s` to end by itself, then it is
        killed. Must be called once only."""
        with self._lock:
            self._closing = True
            self._wake_thread()
        self._thread.join()
        self._disconnect()
        for unused in self._first or ():
            unused.close()
        os.close(self._wake_fd)

    def _main(self) -> None:
        """Run one process after another, on the link's thread, until `close`. When one ends, call `on_lost`, log a
        warning, begin the next incarnation (its socket too, if it buffers while restarting), queue ProcessLost, call
        `on_frames`, and wait before the next: 0.1 s, twice as long (at most 5 s) after each process that did not live
        for 10 s. An incarnation whose socket could not be made, which is logged, has no process to lose: it ends with
        ProcessLost alone."""
        # Inherited by the process: a signal to the whole group finds it deaf from its first instruction on.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        backoff_s = self._timeouts.first_backoff_s
        while True:
            self._had_process = False
            # Without a socket, `send` has refused this incarnation's frames, such as OPEN of the matcher.
            if self._first is not None or not self._kind.buffers_while_restarting:
                started = time.monotonic()
                try:
                    reason = self._run_process()
                except Exception as error:
                    log.exception("a process link failed", process=self._kind.name)
                    reason = type(error).__name__
                if self._closing:
                    return
                if time.monotonic() - started >= self._timeouts.steady_s:
                    backoff_s = self._timeouts.first_backoff_s
                self._report_loss(reason, backoff_s)
            with self._lock:
                self._incarnation += 1
            if self._kind.buffers_while_restarting:
                try:
                    self._first = self._connect()
                except OSError as error:
                    log.warning(f"{self._kind.name}'s next process has no socket", reason=str(error))
            self._inbox.append(ProcessLost(self._had_process))
            self._on_frames()
            self._rest(backoff_s)
            if self._closing:
                return
            backoff_s = min(2 * backoff_s, self._timeouts.max_backoff_s)

    def _report_loss(self, reason: str, backoff_s: float) -> None:
        """Call `on_lost`, and log that a process has ended."""
        try:
            self._kind.on_lost()
        except Exception:
            log.exception("the end of a process was not counted", process=self._kind.name)
        log.warning(f"{self._kind.name}'s process is gone", reason=reason, restart_in_s=backoff_s)

    def _rest(self, time_s: float) -> None:
        """Wait for `time_s`, or until the link closes. Calls of `send` do not end the wait."""
        until_s, poll = time.monotonic() + time_s, select.poll()
        poll.register(self._wake_fd, select.POLLIN)
        while not self._closing and (left_s := until_s - time.monotonic()) > 0:
            self._drain_wake_fd()
            if not self._closing:
                poll.poll(left_s * 1000)

    def _connect(self) -> tuple[socket.socket, socket.socket]:
        """Make the socket pair of the next process, with SETUP as the first frame to send, and forget that a process
        was given up. From now on, `send` accepts frames, although the process is not started yet. Returns the socket of
        this process and that of the next one."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with self._lock:
            self._backlog[:] = self._setup.pack()
            self._giving_up = ""
            self._socket = ours
        return ours, theirs

    def _run_process(self) -> str:
        """Run one process from its start to its end. Returns a text with the reason for the end and the exit code.
        If the start fails, or the process sends bytes that are no frame, that error is raised, after the process has
        been ended."""
        (ours, theirs), self._first = self._first or self._connect(), None
        code: int | None = None
        try:
            with theirs:
                self._child = self._spawn(theirs.fileno())
                self._had_process = True
            reason = self._serve_process(ours)
        finally:
            self._disconnect()
            if self._child is not None:
                code, self._child = self._reap(self._child), None
        return f"{reason} (exit code {code})"

    def _spawn(self, socket_fd: int) -> subprocess.Popen[bytes]:
        """Start the process. It inherits the socket and the descriptors of `fds`; flags tell it their numbers and this
        process's id."""
        inherited = {"--socket": socket_fd, **self._fds}
        numbers = {"--parent": os.getpid(), **inherited}
        flags = [str(part) for pair in numbers.items() for part in pair]
        return subprocess.Popen(
            [*self._kind.command, *flags], stdin=subprocess.DEVNULL, pass_fds=tuple(inherited.values()), close_fds=True
        )

    def _serve_process(self, sock: socket.socket) -> str:
        """Exchange frames and pings with the process until it ends, hangs (too many pings without any frame in between,
        `start_pings` before the first frame, then `silent_pings`), is given up, or the link closes. Returns the reason;
        empty if the link closes. Raises WireError for bytes that are no frame."""
        poll, reader, timeouts = select.poll(), FrameReader(self._kind.frames), self._timeouts
        poll.register(self._wake_fd, select.POLLIN)
        limit, unanswered = timeouts.start_pings, 0
        next_ping_s = time.monotonic() + timeouts.ping_s
        while True:
            with self._lock:
                if self._closing or self._giving_up:
                    return self._giving_up
                poll.register(sock, select.POLLIN | (select.POLLOUT if self._backlog else 0))
            events = dict(poll.poll(max(0.0, next_ping_s - time.monotonic()) * 1000))
            if self._wake_fd in events:
                self._drain_wake_fd()
            happened = events.get(sock.fileno(), 0)
            if happened & select.POLLOUT:
                self._flush(sock)
            if happened & ~select.POLLOUT:
                frames = _receive(sock, reader)
                if frames is None:
                    return "it ended"
                if frames:
                    limit, unanswered = timeouts.silent_pings, 0
                    self._queue_frames(frames)
            elif time.monotonic() >= next_ping_s:
                if unanswered >= limit:
                    return "it hangs"
                unanswered += 1
                next_ping_s = time.monotonic() + timeouts.ping_s
                self.send(self._incarnation, Frame(ProcessFrameKind.PING))
                self._on_ping()

    def _queue_frames(self, frames: Sequence[Frame]) -> None:
        """Queue the process's frames for `take_frame`, and call `on_frames`. READY and PONG are left out; if nothing
        else came, does nothing."""
        passed = [frame for frame in frames if frame.kind not in (ProcessFrameKind.READY, ProcessFrameKind.PONG)]
        if passed:
            self._inbox.extend(passed)
            self._on_frames()

    def _flush(self, sock: socket.socket) -> None:
        """Send a part of the backlog, as much as the socket takes."""
        with self._lock:
            sent = _try_send(sock, memoryview(self._backlog)[:SEND_BYTES].tobytes())
            del self._backlog[:sent]

    def _disconnect(self) -> None:
        """Close the socket and drop the backlog: `send` refuses frames until the next `_connect`."""
        with self._lock:
            sock, self._socket = self._socket, None
            self._backlog.clear()
        if sock is not None:
            sock.close()

    def _reap(self, child: subprocess.Popen[bytes]) -> int:
        """End the process and return its exit code. It is killed; when the link closes, it first has time to end by
        itself."""
        if self._closing:
            try:
                return child.wait(self._timeouts.stop_s)
            except subprocess.TimeoutExpired:
                log.warning(f"{self._kind.name}'s process does not end; killed")
        child.kill()
        return child.wait()

    def _wake_thread(self) -> None:
        os.eventfd_write(self._wake_fd, 1)

    def _drain_wake_fd(self) -> None:
        """Reset the event that wakes the thread. Call it before looking for work, so that no later event is lost."""
        with suppress(BlockingIOError):
            os.eventfd_read(self._wake_fd)


def _try_send(sock: socket.socket, data: bytes) -> int:
    """Send as much as the socket takes; returns how many bytes, 0 if the socket is full or broken."""
    try:
        return sock.send(data)
    except OSError:
        return 0  # full: sent later; broken: the thread notices


def _receive(sock: socket.socket, reader: FrameReader) -> list[Frame] | None:
    """Read the bytes that have come without waiting. Returns the frames that are complete, possibly none, or None if
    the connection has ended. Raises WireError for bytes that are no frame."""
    try:
        data = sock.recv(RECEIVE_BYTES)
    except BlockingIOError:
        return []
    except OSError:
        return None
    return reader.feed(data) if data else None
