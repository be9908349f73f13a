"""AgentMain: the life of the KV transfer agent's process, from its inherited descriptors to the end of its socket.

The process ends with its worker, however the worker ends: the socket closes, and if this process hangs, the kernel
kills it. It ignores signals that a terminal or supervisor sends to the whole process group, because the worker must
drain first.
"""

from __future__ import annotations

import os
import socket
import time
from typing import TYPE_CHECKING, NoReturn

from quire_common.telemetry.logs import setup_logging
from quire_common.telemetry.tracing import setup_tracing_of, shutdown_tracing
from quire_worker.engine.transfer_agent import POOL_FILLING
from quire_worker.kv_transfer.handlers import AgentContext
from quire_worker.kv_transfer.job_queue import Job
from quire_worker.kv_transfer.ring import Ring
from quire_worker.kv_transfer.setup import AgentSetup
from quire_worker.kv_transfer.wire import AgentFrameKind, unpack_move
from quire_worker.side_process.child import FrameSender, exit_now, frames_of, parse_descriptors, read_setup, run_logged
from quire_worker.side_process.frames import Frame, WireError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from quire_worker.kv_transfer.handlers import MakeHandlers

# Flags of sockets on which peers come in.
LISTENERS = ("tcp", "unix")
# Page I/O stands back where it wants the core of the engine.
NICENESS = 5
LAST_SPANS_S = 1.0


class AgentMain:
    """Reads frames on the calling thread; its handlers do the work on theirs."""

    def __init__(
        self,
        sender: FrameSender,
        ring: Ring,
        setup: AgentSetup,
        listeners: tuple[int, ...],
        make_handlers: MakeHandlers,
    ) -> None:
        self._send = sender.send
        self._heard_s = time.monotonic()
        mac = setup.page_mac()
        self._handlers = make_handlers(AgentContext(setup, ring, self._send, listeners, self._silence_s, mac))

    def serve(self, frames: Iterator[Frame]) -> None:
        """Tell the engine that this process is ready, pass frames to the handlers until the frames end, then close the
        handlers of loads and of stores. An error of a frame passes on, and nothing is closed."""
        self._send(Frame(AgentFrameKind.READY))
        for frame in frames:
            self._heard_s = time.monotonic()
            self._handle_frame(frame)
        for handler in self._handlers[:2]:
            handler.close()

    def _handle_frame(self, frame: Frame) -> None:
        """Pass a frame of the engine to its handler, or answer a PING by PONG. Moves that fill the pool go to the load
        handler, other moves to the store handler, cancellations to both. Raises WireError for a kind of frame that the
        engine never sends, or that needs a direct handler where there is none."""
        load_handler, store_handler, direct_handler = self._handlers
        match frame.kind:
            case AgentFrameKind.MOVE:
                move, submitted_ns = unpack_move(frame)
                handler = load_handler if move.kind in POOL_FILLING else store_handler
                handler.start_job(Job(move, frame.generation, submitted_ns))
            case AgentFrameKind.FILLED:
                store_handler.filled(frame.generation, frame.subject, frame.pairs())
            case AgentFrameKind.RETURNED:
                load_handler.return_slots(frame.numbers())
            case AgentFrameKind.CANCEL:
                load_handler.cancel_before(frame.generation)
                store_handler.cancel_before(frame.generation)
            case AgentFrameKind.CUT:
                load_handler.cancel_job(frame.subject)
                store_handler.cancel_job(frame.subject)
            case AgentFrameKind.OFFERED if direct_handler is not None:
                direct_handler.offered(frame.subject, frame.number())
            case AgentFrameKind.FETCHED if direct_handler is not None:
                direct_handler.fetched(frame.subject, frame.number())
            case AgentFrameKind.PING:
                self._send(Frame(AgentFrameKind.PONG))
            case _:
                raise WireError(f"{frame.kind.name} is none of the engine's")

    def _silence_s(self) -> float:
        """Seconds since the engine's last frame."""
        return time.monotonic() - self._heard_s


def run_agent(argv: Sequence[str], make_handlers: MakeHandlers) -> NoReturn:
    """Run the agent's process at a lower priority: parse its flags, serve frames until the worker closes the socket,
    and exit. SIGINT and SIGTERM are ignored. An error in serving is logged and makes the exit code 1. Does not
    return."""
    given = parse_descriptors(argv, "python -m quire_worker.kv_transfer", __doc__, LISTENERS)
    os.nice(NICENESS)
    listeners = tuple(fd for name in LISTENERS if (fd := getattr(given, name)) is not None)
    sock = socket.socket(fileno=given.socket)
    code = run_logged("transfer agent", lambda: _serve(sock, given.ring, listeners, make_handlers))
    shutdown_tracing(LAST_SPANS_S)
    exit_now(code)


def _serve(sock: socket.socket, ring_fd: int, listeners: tuple[int, ...], make_handlers: MakeHandlers) -> None:
    """Read SETUP, set up logging, tracing and the ring, then serve frames until they end. Returns at once if the socket
    ends before SETUP. Raises WireError if another frame comes first."""
    frames = frames_of(sock, AgentFrameKind)
    payload = read_setup(frames, AgentFrameKind.SETUP)
    if payload is None:
        return
    setup = AgentSetup.from_json(payload)
    setup_logging("worker", setup.log_level, setup.log_format, instance=setup.instance)
    setup_tracing_of(setup, "worker", setup.instance)
    ring = Ring(ring_fd, setup.page_bytes, setup.slots)
    AgentMain(FrameSender(sock), ring, setup, listeners, make_handlers).serve(frames)
