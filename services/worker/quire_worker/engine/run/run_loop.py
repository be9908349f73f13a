"""RunLoop: the model thread. It takes messages from its inbox, applies them between steps, launches steps, and hands
Reports out.

When the model thread has nothing to do, it waits for its inbox, which receives Grants, ends of steps and moves, and
sessions that attach and detach. The reader and writer threads reach it only through queues. So the model never waits
for gRPC, and a reader waits for the model only while too many Grants are queued. One scheduler is attached at a time. A
new scheduler replaces the old one: a scheduler that hangs must not lock its replacement out.
"""

from __future__ import annotations

import queue
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire_common.errors import FailedPrecondition, QuireError, Unavailable, as_quire_error
from quire_common.telemetry.logs import get_logger
from quire_worker.engine.run.session import Flush, Session

if TYPE_CHECKING:
    from collections.abc import Callable

    from quire_common.credit import Epoch, Grant, WorkerHello
    from quire_worker.engine.engine import Engine

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Attach:
    session: Session


@dataclass(frozen=True, slots=True)
class _Granted:
    session: Session
    grant: Grant
    arrival_us: int


@dataclass(frozen=True, slots=True)
class _Detach:
    session: Session
    error: QuireError | None


@dataclass(frozen=True, slots=True)
class _Wake:
    pass


@dataclass(frozen=True, slots=True)
class _Drain:
    pass


@dataclass(frozen=True, slots=True)
class _Stop:
    pass


_Item = _Attach | _Granted | _Detach | _Wake | _Drain | _Stop
# `close` waits so long for the model thread: a device that hangs must not keep the process alive.
CLOSE_LIMIT_S = 5.0
# The inbox must be empty for so long before the device is asked to do its deferred work, which then runs without a
# pause. The gaps between the requests of a client that sends one after the other are shorter.
QUIET_S = 0.1


class RunLoop:
    """Runs the engine on the model thread. `attach`, `detach` and `wake` may be called from any thread and return at
    once."""

    def __init__(
        self, engine: Engine, hello: Callable[[Epoch], WorkerHello], on_fatal: Callable[[QuireError], None]
    ) -> None:
        self._engine = engine
        self._hello = hello
        self._on_fatal = on_fatal
        self._inbox: queue.SimpleQueue[_Item] = queue.SimpleQueue()
        self._session: Session | None = None
        # The newest session, and the earlier ones that were not over when it came.
        self._sessions: tuple[Session, ...] = ()
        # The longest wait for an item before the device is asked to do deferred work; None: the device has none.
        self._inbox_timeout_s: float | None = QUIET_S
        self._ended = False
        self._ending = threading.Lock()
        self._vacant = threading.Event()
        self._vacant.set()
        self._thread = threading.Thread(target=self._main, name="model", daemon=True)

    @property
    def attached(self) -> bool:
        """Whether a scheduler is attached to this worker, or is about to be. May be called from any thread."""
        return any(not session.is_over for session in self._sessions)

    def start(self) -> None:
        """Start the model thread."""
        self._thread.start()

    def attach(self) -> Session:
        """Return a session for a new scheduler, at once. The model thread then ends the run of the former scheduler,
        which gets SCHEDULER_REPLACED, and sends the hello as the new session's first frame. If the new scheduler leaves
        before that, the former one keeps its run. After the loop has ended, the session is closed with
        WORKER_STOPPED."""
        session = Session()
        with self._ending:
            if self._ended:
                session.close(_stopped())
            else:
                self._sessions = (*(other for other in self._sessions if not other.is_over), session)
                self._inbox.put(_Attach(session))
        return session

    def granted(self, session: Session, grant: Grant, arrival_us: int) -> None:
        """Queue a session's Grant for the model thread, with its time of arrival. It is ignored if the session is no
        longer attached. Blocks while 64 Grants wait to be applied."""
        if session.wait_for_room():
            self._inbox.put(_Granted(session, grant, arrival_us))

    def detach(self, session: Session, error: QuireError | None = None) -> None:
        """Close a session whose stream has ended, or, with `error`, one that must end. The session closes at once, even
        while the model thread waits for a device; the model thread then ends its run. Idempotent."""
        session.close(error)
        self._inbox.put(_Detach(session, error))

    def wake(self) -> None:
        """Have the model thread look at the engine: a step or a move has ended."""
        self._inbox.put(_Wake())

    def drain(self) -> None:
        """Tell the scheduler, at once and in every later Report, that the worker is about to stop."""
        self._inbox.put(_Drain())

    def wait_vacant(self, timeout_s: float) -> bool:
        """Wait until no slot holds a sequence; returns whether that came true within `timeout_s`."""
        return self._vacant.wait(timeout_s)

    def close(self) -> None:
        """Stop the model thread, which closes the session and those in the inbox with WORKER_STOPPED, and wait for the
        thread. If it has not ended after CLOSE_LIMIT_S, this call closes the session itself. Before `start`, this call
        closes the sessions in the inbox."""
        if self._thread.ident is None:
            self._refuse_remaining()
        self._inbox.put(_Stop())
        if self._thread.is_alive():
            self._thread.join(CLOSE_LIMIT_S)
        session = self._session
        if session is not None and self._thread.is_alive():
            session.close(_stopped())

    def _main(self) -> None:
        """Run the engine and handle the inbox, on the model thread, until `close`. Errors of a step or a Grant end only
        the session. Any other exception ends the loop; it is logged and passed to `on_fatal`. At the end, the session
        and all sessions still in the inbox are closed with WORKER_STOPPED, and the worker counts as vacant."""
        try:
            while self._drain_inbox(wait=self._run_once()):
                pass
        except Exception as error:
            log.exception("the model thread failed")
            self._on_fatal(as_quire_error(error))
        finally:
            self._end_session(_stopped())
            self._vacant.set()
            self._refuse_remaining()

    def _run_once(self) -> bool:
        """Launch the steps that may run, and queue at most one Report for the scheduler, or a Flush if there is none
        and nothing is in flight. Returns whether the engine has nothing to do until the next item of the inbox; True
        without a session. An engine error, or a scheduler that does not read, ends the session and the run; errors of
        `_abort_session` pass on. If no slot holds a sequence, the worker counts as vacant."""
        session, engine = self._session, self._engine
        if session is None:
            return True
        try:
            while engine.launch():
                pass
            report = engine.collect()
        except Exception as error:
            log.exception("the engine failed outside the model; its run is over")
            self._abort_session(as_quire_error(error))
            return True
        if report is not None:
            session.outgoing.put(report)
        elif not engine.in_flight:
            session.outgoing.put(Flush())
        if session.is_slow:
            self._abort_session(_too_slow())
        elif not engine.residents.table.started():
            self._vacant.set()
        return report is None

    def _drain_inbox(self, wait: bool) -> bool:
        """Handle all items in the inbox; if `wait`, first wait for one. Returns False once the loop is to end. If
        `wait` and no item comes for a while, the device does some of its deferred work, unless it has none or steps are
        in flight."""
        block = wait
        try:
            while True:
                item = self._inbox.get(block, self._inbox_timeout_s)
                block = False
                if isinstance(item, _Stop):
                    return False
                self._handle(item)
                self._inbox_timeout_s = QUIET_S
        except queue.Empty:
            if block:
                self._inbox_timeout_s = self._let_prepare()
            return True

    def _let_prepare(self) -> float | None:
        """Let the device do some of its deferred work, unless steps are in flight. Returns the seconds for which the
        inbox must be empty before the next call, or None if no work is left."""
        if self._engine.in_flight:
            return QUIET_S
        return 0.0 if self._engine.prepare() else None

    def _handle(self, item: _Item) -> None:
        """Handle one item of the inbox: apply a Grant, drain, attach a session in place of the present one, or detach
        it. Grants and detachments of a session that is not attached are ignored, and so is a session that is over
        before it is attached."""
        if isinstance(item, _Granted):
            item.session.applied()
            if item.session is self._session:
                self._apply(item)
        elif isinstance(item, _Drain):
            self._engine.drain()
        elif isinstance(item, _Attach) and not item.session.is_over:
            former, self._session = self._session, item.session  # so that a failure to begin a run closes it
            if former is not None:
                error = _replaced()
                former.close(error)
                self._begin_run(error.code)
            item.session.outgoing.put(self._hello(self._engine.epoch))
            log.info("scheduler attached", run=self._engine.epoch.run)
        elif isinstance(item, _Detach) and item.session is self._session:
            self._abort_session(item.error)

    def _apply(self, item: _Granted) -> None:
        """Apply a Grant to the engine. The worker no longer counts as vacant. An error ends the session and the run."""
        self._vacant.clear()
        try:
            self._engine.apply(item.grant, item.arrival_us)
        except Exception as error:
            if not isinstance(error, QuireError):
                log.exception("a Grant could not be applied")
            self._abort_session(as_quire_error(error))

    def _abort_session(self, error: QuireError | None) -> None:
        """Close the present session, with the error if there is one, and begin another run of the engine. Raises the
        errors of `Engine.begin_run`."""
        self._end_session(error)
        self._begin_run(error.code if error else "")

    def _begin_run(self, code: str) -> None:
        """Begin another run of the engine, which waits for running steps and clears its slots, and log the `code` with
        which the former session ended. The worker then counts as vacant. Raises the errors of `Engine.begin_run`."""
        epoch = self._engine.begin_run()
        self._vacant.set()
        log.info("scheduler detached", run=epoch.run, code=code)

    def _end_session(self, error: QuireError | None) -> None:
        """Close the present session, if there is one; the engine's run goes on."""
        if self._session is not None:
            self._session.close(error)
            self._session = None

    def _refuse_remaining(self) -> None:
        """Close the sessions that still wait in the inbox with WORKER_STOPPED, and have `attach` refuse later ones: the
        model thread is gone."""
        with self._ending:
            self._ended = True
        try:
            while True:
                item = self._inbox.get_nowait()
                if isinstance(item, _Attach):
                    item.session.close(_stopped())
        except queue.Empty:
            return


def _stopped() -> QuireError:
    return Unavailable("WORKER_STOPPED", "The worker has stopped.", "Attach to it once it is up again.")


def _replaced() -> QuireError:
    """Return the error for a session whose scheduler was replaced by another one."""
    return FailedPrecondition(
        "SCHEDULER_REPLACED",
        "Another scheduler attached to this worker; only the newest is served.",
        "Run one scheduler per worker; see which other instance names this worker.",
    )


def _too_slow() -> QuireError:
    """Return the error for a session whose scheduler left too many Reports unread."""
    return Unavailable(
        "SCHEDULER_TOO_SLOW",
        "The scheduler left too many Reports unread; its run is over.",
        "Attach again; see why the scheduler did not read.",
    )
