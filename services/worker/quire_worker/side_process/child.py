"""The process's own side: it reads the engine's frames, and ends when its engine ends, even by a crash."""

from __future__ import annotations

import argparse
import ctypes
import logging
import os
import signal
import sys
import threading
from typing import TYPE_CHECKING, NoReturn

from quire_common.errors import QuireError
from quire_common.telemetry.logs import get_logger
from quire_worker.side_process.frames import FrameReader, WireError

if TYPE_CHECKING:
    import enum
    import socket
    from collections.abc import Callable, Iterator, Sequence

    from quire_worker.side_process.frames import Frame

log = get_logger(__name__)
EXIT_FAILED = 1
EXIT_ORPHANED = 3
RECEIVE_BYTES = 1 << 18
_PR_SET_PDEATHSIG = 1


class FrameSender:
    """Sends frames to the engine, from any thread."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._sending = threading.Lock()

    def send(self, frame: Frame) -> None:
        """Send a frame; may block. Nothing is raised if the engine has gone: the reading thread sees that too."""
        try:
            with self._sending:
                self._sock.sendall(frame.pack())
        except OSError:
            return


def parse_descriptors(
    argv: Sequence[str], program: str, description: str | None, more: Sequence[str] = ()
) -> argparse.Namespace:
    """Parse the flags of a process: its parent's id, and inherited descriptors: the socket, the ring, and the optional
    ones of `more`. Also ignore SIGINT and SIGTERM from now on, and have this process end with its parent (see
    `end_with`)."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    parser = argparse.ArgumentParser(prog=program, description=description)
    for name in ("parent", "socket", "ring"):
        parser.add_argument(f"--{name}", type=int, required=True)
    for name in more:
        parser.add_argument(f"--{name}", type=int)
    given = parser.parse_args(argv)
    end_with(given.parent)
    return given


def run_logged(name: str, serve: Callable[[], None]) -> int:
    """Serve until the end. Returns the process's exit code: 0, or EXIT_FAILED after an error, which is logged."""
    try:
        serve()
    except QuireError as error:
        log.error(f"the {name} failed", code=error.code, error=error.message, fix=error.fix)
        return EXIT_FAILED
    except Exception:
        log.exception(f"the {name} failed")
        return EXIT_FAILED
    return 0


def exit_now(code: int) -> NoReturn:
    """Flush logs and stderr, and end the process at once, without waiting for threads that are at work."""
    logging.shutdown()
    sys.stderr.flush()
    os._exit(code)


def read_setup(frames: Iterator[Frame], setup: enum.IntEnum) -> bytes | None:
    """Return the payload of the first frame; None if the frames end before it. Raises WireError if the frame is not of
    the kind `setup`."""
    first = next(frames, None)
    if first is None:
        return None
    if first.kind != setup:
        raise WireError(f"{first.kind.name} before {setup.name}")
    return first.payload


def frames_of(sock: socket.socket, kinds: type[enum.IntEnum]) -> Iterator[Frame]:
    """Yield the engine's frames until its socket ends or breaks. Raises WireError for bytes that are no frame."""
    reader = FrameReader(kinds)
    try:
        while data := sock.recv(RECEIVE_BYTES):
            yield from reader.feed(data)
    except ConnectionError:
        return


def end_with(parent: int) -> None:
    """On Linux, have the kernel kill this process when its parent ends; if this is refused, only print that. Exit at
    once, with EXIT_ORPHANED, if the parent has ended already. The signal comes when the *thread* that started this
    process ends: ProcessLink's, which lives as long as the worker wants the process."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            print(f"prctl: {os.strerror(ctypes.get_errno())}", file=sys.stderr)
    if os.getppid() != parent:  # it died before prctl: no signal will come
        sys.exit(EXIT_ORPHANED)
