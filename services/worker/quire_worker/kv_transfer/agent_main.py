"""AgentMain: the life of the KV transfer agent's process, from its inherited descriptors to the end of its socket.

It ends with its worker, however that ends: by the socket's end, and by the kernel's signal where it hangs. Signals that
a terminal or supervisor sends to the whole group are the worker's affair: it drains first.
"""

from __future__ import annotations

import argparse
import ctypes
import logging
import os
import signal
import socket
import sys
import threading
import time
from typing import TYPE_CHECKING, NoReturn

from quire_common.errors import QuireError
from quire_common.telemetry.logs import get_logger, setup_logging
from quire_common.telemetry.tracing import setup_tracing, shutdown_tracing
from quire_worker.engine.transfer_agent import POOL_FILLING
from quire_worker.kv_transfer.handlers import AgentContext
from quire_worker.kv_transfer.job_queue import Job
from quire_worker.kv_transfer.ring import Ring
from quire_worker.kv_transfer.setup import AgentSetup
from quire_worker.kv_transfer.wire import AgentFrameKind, Frame, FrameReader, WireError, unpack_move

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from quire_worker.kv_transfer.handlers import MakeHandlers

log = get_logger(__name__)
EXIT_ORPHANED = 3
# Flags of sockets on which peers come in.
LISTENERS = ("tcp", "unix")
# Page I/O stands back where it wants the core of the engine.
NICENESS = 5
EXIT_FAILED = 1
RECEIVE_BYTES = 1 << 18
LAST_SPANS_S = 1.0
_PR_SET_PDEATHSIG = 1


class AgentMain:
    """Reads frames on the calling thread; its handlers do the work."""

    def __init__(
        self,
        sock: socket.socket,
        ring: Ring,
        setup: AgentSetup,
        listeners: tuple[int, ...],
        make_handlers: MakeHandlers,
    ) -> None:
        self._sock = sock
        self._sending = threading.Lock()
        self._heard_s = time.monotonic()
        mac = setup.page_mac()
        self._handlers = make_handlers(AgentContext(setup, ring, self._send, listeners, self._silence_s, mac))

    def serve(self, frames: Iterator[Frame]) -> None:
        """Tell the engine that this process is ready, pass frames to the handlers until the frames end, then close the
        handlers."""
        self._send(Frame(AgentFrameKind.READY))
        for frame in frames:
            self._heard_s = time.monotonic()
            self._handle_frame(frame)
        for handler in self._handlers[:2]:
            handler.close()

    def _handle_frame(self, frame: Frame) -> None:
        """Pass a frame of the engine to the handler that it concerns, or answer a PING; raises WireError for a kind
        that the engine never sends."""
        load_handler, store_handler, direct_handler = self._handlers
        match frame.kind:
            case AgentFrameKind.MOVE:
                move, submitted_ns = unpack_move(frame)
                handler = load_handler if move.kind in POOL_FILLING else store_handler
                handler.start_job(Job(move, frame.generation, submitted_ns))
            case AgentFrameKind.FILLED:
                store_handler.filled(frame.generation, frame.move, frame.pairs())
            case AgentFrameKind.RETURNED:
                load_handler.return_slots(frame.numbers())
            case AgentFrameKind.CANCEL:
                load_handler.cancel_before(frame.generation)
                store_handler.cancel_before(frame.generation)
            case AgentFrameKind.CUT:
                load_handler.cancel_job(frame.move)
                store_handler.cancel_job(frame.move)
            case AgentFrameKind.OFFERED if direct_handler is not None:
                direct_handler.offered(frame.move, frame.number())
            case AgentFrameKind.FETCHED if direct_handler is not None:
                direct_handler.fetched(frame.move, frame.number())
            case AgentFrameKind.PING:
                self._send(Frame(AgentFrameKind.PONG))
            case _:
                raise WireError(f"{frame.kind.name} is none of the engine's")

    def _silence_s(self) -> float:
        """Seconds since the engine's last frame."""
        return time.monotonic() - self._heard_s

    def _send(self, frame: Frame) -> None:
        """Send a frame to the engine, from any thread; may block. Nothing is raised if the engine has gone."""
        try:
            with self._sending:
                self._sock.sendall(frame.pack())
        except OSError:
            return  # the engine has gone; the reading thread sees it too


def run_agent(argv: Sequence[str], make_handlers: MakeHandlers) -> NoReturn:
    """Run the agent's process: parse its flags, serve frames until the worker closes the socket, and exit. Signals are
    ignored; an error is logged and makes the exit code 1. Does not return."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    parser = argparse.ArgumentParser(prog="python -m quire_worker.kv_transfer", description=__doc__)
    for name in ("parent", "socket", "ring"):
        parser.add_argument(f"--{name}", type=int, required=True)
    for name in LISTENERS:
        parser.add_argument(f"--{name}", type=int)
    given = parser.parse_args(argv)
    os.nice(NICENESS)
    _end_with(given.parent)
    sock = socket.socket(fileno=given.socket)
    code = 0
    try:
        listeners = tuple(fd for name in LISTENERS if (fd := getattr(given, name)) is not None)
        _serve(sock, given.ring, listeners, make_handlers)
    except QuireError as error:
        log.error("the transfer agent failed", code=error.code, error=error.message, fix=error.fix)
        code = EXIT_FAILED
    except Exception:
        log.exception("the transfer agent failed")
        code = EXIT_FAILED
    shutdown_tracing(LAST_SPANS_S)
    logging.shutdown()
    # A thread may wait for a peer; nobody waits for that thread any more.
    sys.stderr.flush()
    os._exit(code)


def _serve(sock: socket.socket, ring_fd: int, listeners: tuple[int, ...], make_handlers: MakeHandlers) -> None:
    """Read SETUP, set up logging, tracing and the ring, then serve frames until they end. Raises WireError if another
    frame comes first."""
    frames = _frames(sock)
    first = next(frames, None)
    if first is None:
        return
    if first.kind != AgentFrameKind.SETUP:
        raise WireError(f"{first.kind.name} before SETUP")
    setup = AgentSetup.from_json(first.payload)
    setup_logging("worker", setup.log_level, setup.log_format, instance=setup.instance)
    setup_tracing("worker", setup.instance, setup.otlp_traces_endpoint)
    ring = Ring(ring_fd, setup.page_bytes, setup.slots)
    AgentMain(sock, ring, setup, listeners, make_handlers).serve(frames)


def _frames(sock: socket.socket) -> Iterator[Frame]:
    """Yield the engine's frames until its socket ends."""
    reader = FrameReader()
    try:
        while data := sock.recv(RECEIVE_BYTES):
            yield from reader.feed(data)
    except ConnectionError:
        return


def _end_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends; exit at once if the parent has ended already. The signal
    comes when the *thread* that started this process ends: AgentLink's, which lives as long as the worker wants its KV
    transfer agent."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            print(f"prctl: {os.strerror(ctypes.get_errno())}", file=sys.stderr)
    if os.getppid() != parent:  # it died before prctl: no signal will come
        sys.exit(EXIT_ORPHANED)
