"""The main program of the matcher's process. It serves frames of its worker until their socket closes, and does not
import torch.

The main thread reads frames and answers pings at once; the quick thread processes all other frames. So the worker does
not take the process for hung if the masks of a step take seconds.

The process ends with its worker, as the KV transfer agent does, and ignores signals that a terminal sends to the whole
process group. If a thread works on one sequence for too long (see matcher_threads), the process ends itself. The mask
ring then names the sequence, and the engine starts another process.
"""

from __future__ import annotations

import queue
import resource
import socket
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from quire_common.telemetry.logs import get_logger, setup_logging
from quire_worker.matcher.guidance_backend import GuidanceBackend
from quire_worker.matcher.mask_ring import MaskRing
from quire_worker.matcher.matcher import Matcher
from quire_worker.matcher.matcher_threads import make_executors
from quire_worker.matcher.setup import MatcherSetup
from quire_worker.matcher.vocabulary import load_vocabulary
from quire_worker.matcher.wire import MatcherFrameKind
from quire_worker.side_process.child import (
    EXIT_FAILED,
    FrameSender,
    exit_now,
    frames_of,
    parse_descriptors,
    read_setup,
    run_logged,
)
from quire_worker.side_process.frames import Frame

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

log = get_logger(__name__)
EXIT_OVERDUE = 4
_WATCH_S = 0.5
# Python's default is 5 ms: a thread that replays would delay each mask by as much.
_SWITCH_S = 0.0005


def run_matcher(argv: Sequence[str]) -> NoReturn:
    """Run the process with these command-line arguments, and exit when the worker closes the socket, or with code 1
    after an error in serving, which is logged."""
    given = parse_descriptors(argv, "python -m quire_worker.matcher", __doc__)
    exit_now(run_logged("matcher", lambda: _serve(socket.socket(fileno=given.socket), given.ring)))


def _serve(sock: socket.socket, ring_fd: int) -> None:
    """Read the SETUP frame and the model's tokenizer, limit the process's memory, start the threads, send READY, and
    serve frames until they end. Returns at once if they end before SETUP. Pings are answered here; other frames go to
    the quick thread. Raises WireError if another frame comes first, and the errors of `load_vocabulary`. If a thread
    fails, or works on one sequence for too long, the whole process ends."""
    frames = frames_of(sock, MatcherFrameKind)
    payload = read_setup(frames, MatcherFrameKind.SETUP)
    if payload is None:
        return
    setup = MatcherSetup.from_json(payload)
    setup_logging("worker", setup.log_level, setup.log_format, instance=setup.instance)
    ring = MaskRing(ring_fd, setup.mask_slots, setup.entries_per_slot, setup.vocab_size, setup.process)
    tokenizer = load_vocabulary(Path(setup.model), setup.vocab_size, setup.eos_token_ids)
    backend = GuidanceBackend(tokenizer, setup.vocab_size, setup.eos_token_ids)
    sender = FrameSender(sock)

    def fail() -> None:
        log.exception("the matcher failed")
        exit_now(EXIT_FAILED)

    sys.setswitchinterval(_SWITCH_S)
    _limit_memory(setup.grammar_bytes)
    matcher = Matcher(backend, ring, sender.send, make_executors(ring, fail))
    unread: queue.SimpleQueue[Frame] = queue.SimpleQueue()
    threading.Thread(target=_watch, args=(matcher,), name="watch", daemon=True).start()
    threading.Thread(target=_receive_all, args=(matcher, unread, fail), name="quick", daemon=True).start()
    sender.send(Frame(MatcherFrameKind.READY))
    for frame in frames:
        if frame.kind == MatcherFrameKind.PING:
            sender.send(Frame(MatcherFrameKind.PONG))
        else:
            unread.put(frame)


def _receive_all(matcher: Matcher, unread: queue.SimpleQueue[Frame], on_failure: Callable[[], None]) -> None:
    """Pass frames to the matcher for ever, on the quick thread. If that raises, call `on_failure`, and let the
    exception end the thread."""
    while True:
        try:
            matcher.receive(unread.get())
        except BaseException:
            on_failure()
            raise


def _limit_memory(grammar_bytes: int) -> None:
    """Limit the process's address space to what it has mapped plus these bytes. So it ends, without a core dump, before
    grammars take all memory of the machine. Only Linux says how much is mapped already; elsewhere there is no limit. A
    hard limit that is lower already stays."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    statm = Path("/proc/self/statm")
    if statm.exists():
        limit = int(statm.read_text().split()[0]) * resource.getpagesize() + grammar_bytes
        most = resource.getrlimit(resource.RLIMIT_AS)[1]
        if most == resource.RLIM_INFINITY or limit < most:
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _watch(matcher: Matcher) -> None:
    """Check every _WATCH_S, for ever. If a thread has worked on one sequence for too long, end the process with
    EXIT_OVERDUE."""
    waiting = threading.Event()
    while not waiting.wait(_WATCH_S):
        if matcher.finalize_if_overdue():
            log.error("a grammar takes too long; the matcher ends itself")
            exit_now(EXIT_OVERDUE)
