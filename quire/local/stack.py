"""LocalStack: starts a supervisor process, follows its events, and ends it. The process that uses this class is the
stack's owner."""

from __future__ import annotations

import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import IO

from quire.errors import StartFailed
from quire.local import events
from quire.local.spec import StackSpec
from quire.local.state import StateDirectory

# Beyond the time to drain, before the supervisor itself is killed (its children go with it).
_STOP_MARGIN_S = 10.0
OnEvent = Callable[[events.Event], None]


class LocalStack:
    """A running stack. An owned stack ends with `close`, when this object is collected, or with this process. A
    detached stack goes on without this process."""

    def __init__(self, spec: StackSpec, on_event: OnEvent = lambda event: None) -> None:
        """Start the stack; return when all services serve. `on_event` is called with each event, in this thread until
        then. Later events of an owned stack come in a thread of its own; those of a detached stack are not followed.
        Raises StartFailed with the root cause, also if a stack of this name runs already; no process of this start is
        left running then. Raises FailedPrecondition if the stack's directory cannot be made."""
        self.spec = spec
        self.directory = StateDirectory(spec.name)
        self.deaths: list[events.Died] = []
        # Why an owned stack ended by itself, if it did.
        self.failure: StartFailed | None = None
        self.ended = threading.Event()
        self._on_event = on_event
        self._popen = self._launch()
        # Bound to the process, not to self, so that it can run when self is collected.
        limit_s = spec.drain_timeout_s + _STOP_MARGIN_S
        self._finalizer = weakref.finalize(self, _end, self._popen, limit_s) if spec.owned else None
        try:
            self.ready = self._until_ready()
        except BaseException:
            self.terminate()  # needed for a detached stack; an owned stack also stops when `_end` closes its input
            _end(self._popen, limit_s)
            _close(self._popen.stdout)
            raise
        if spec.owned:
            follow = weakref.WeakMethod(self._take)
            threading.Thread(
                target=_follow, args=(self._popen.stdout, follow, self.ended), name="quire-events", daemon=True
            ).start()
        else:
            _close(self._popen.stdin)
            _close(self._popen.stdout)

    @property
    def grpc(self) -> str:
        """Address of the router's gRPC."""
        return self.ready.grpc

    @property
    def supervisor_pid(self) -> int:
        """The pid of the supervisor."""
        return self._popen.pid

    def close(self) -> None:
        """Stop an owned stack, wait for its end, and kill it 10 s after its time to drain. Does nothing for a detached
        stack. Idempotent."""
        if self._finalizer is not None:
            self._finalizer()

    def terminate(self) -> None:
        """Ask the supervisor to stop the stack; a second call ends the draining. Does not wait."""
        if self._popen.poll() is None:
            self._popen.terminate()

    def _launch(self) -> subprocess.Popen[str]:
        """Make the stack's directory, start the supervisor's process with its log there, send it the spec, and return
        it. An earlier log is emptied, unless a stack of this name still runs. Does not wait for the stack."""
        self.directory.create()
        path = self.directory.log("supervisor")
        if self.directory.running() is None:
            path.write_bytes(b"")
        with path.open("ab") as log:  # a running supervisor writes on
            popen = subprocess.Popen(
                [sys.executable, "-P", "-m", "quire.local"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,  # a terminal's Ctrl-C is for the owner, who then ends the stack in order
            )
        if popen.stdin is None:
            raise AssertionError("a pipe was asked for")
        popen.stdin.write(self.spec.to_json() + "\n")
        popen.stdin.flush()
        return popen

    def _until_ready(self) -> events.Ready:
        """Read the supervisor's events and pass them on until the stack is ready, without the records of `_take`;
        return the Ready event. Raises StartFailed if the stack fails or is stopped, or if the supervisor ends."""
        for line in self._popen.stdout or ():
            event = events.decode(line)
            if event is not None:
                self._on_event(event)
            if isinstance(event, events.Ready):
                return event
            if isinstance(event, events.Failed):
                raise _error(event)
            if isinstance(event, events.Stopped):
                raise StartFailed("STOPPED", "The stack was stopped while it started.", "Start it again.")
        log = self.directory.log("supervisor")
        raise StartFailed(
            "SUPERVISOR_DIED", "The supervisor ended unexpectedly.", "Report it with its log.", log=str(log)
        )

    def _take(self, event: events.Event) -> None:
        """Add a Died event to `deaths`, or keep the StartFailed error of a Failed event as `failure`; then pass any
        event on to the caller."""
        if isinstance(event, events.Died):
            self.deaths.append(event)
        if isinstance(event, events.Failed):
            self.failure = _error(event)
        self._on_event(event)


def _error(event: events.Failed) -> StartFailed:
    return StartFailed(event.code, event.message, event.fix, service=event.service, log=event.log)


def _follow(lines: IO[str], take: weakref.WeakMethod[Callable[[events.Event], None]], ended: threading.Event) -> None:
    """Read the supervisor's events to the end, so that the pipe does not fill, and call `take` with each while the
    stack's object lives. If `take` raises OSError, such as for a pipe whose reader has ended, the thread goes on with
    the next event. Runs in a thread; closes `lines` and sets `ended` at the end, also after an error."""
    try:
        with lines:
            for line in lines:
                event, taker = events.decode(line), take()
                if event is not None and taker is not None:
                    with suppress(OSError):
                        taker(event)
                del taker
    finally:
        ended.set()


def _end(popen: subprocess.Popen[str], limit_s: float) -> None:
    """Close the supervisor's standard input, which is its order to stop, and wait for its end; at the limit, kill
    it."""
    _close(popen.stdin)
    try:
        popen.wait(limit_s)
    except subprocess.TimeoutExpired:
        popen.kill()
        popen.wait()


def _close(pipe: IO[str] | None) -> None:
    """Close the pipe, if there is one. Raises no error if the supervisor has ended."""
    if pipe is not None:
        try:
            pipe.close()
        except BrokenPipeError:
            return  # the supervisor is gone already
