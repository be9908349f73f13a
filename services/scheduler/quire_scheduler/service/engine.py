"""Engine: the event loop around the core. It connects the core to the routers' sessions, the worker's link and the
kvstore.

The engine owns the core of the present epoch; while the worker is away it has none. All code of this module runs in one
event loop and calls the core synchronously. It knows nothing of protobuf.
"""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from quire_common.errors import NotFound, QuireError, Unavailable
from quire_common.telemetry.logs import get_logger
from quire_scheduler import metrics
from quire_scheduler.core.request_checks import draining_error
from quire_scheduler.core.roles import Roles, role_changing
from quire_scheduler.core.scheduler import Scheduler
from quire_scheduler.disaggregation.handover import NO_TRANSFER
from quire_scheduler.kv.kv_traffic import LookupResult
from quire_scheduler.service.clock import from_monotonic, now_s
from quire_scheduler.service.request_spans import RequestSpans
from quire_scheduler.service.wake_event import WakeEvent

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence
    from typing import Any

    from quire_common.credit import Grant, ModelInfo, Report, WorkerHello
    from quire_common.sequence import RequestContext
    from quire_common.sequence import Sequence as TokenSequence
    from quire_common.ticket import KvTransfer, Ticket
    from quire_scheduler.config import SchedulerConfig
    from quire_scheduler.core.outputs import SessionOutputs
    from quire_scheduler.core.request import Request
    from quire_scheduler.disaggregation.handover import Handover
    from quire_scheduler.kv.kv_traffic import Lookup
    from quire_scheduler.service.output_sink import OutputSink

log = get_logger(__name__)
_TICK_S = 0.1
# Finding the oldest waiting request looks at every request, so it is done less often.
_TICKS_PER_OLDEST_WAIT = 10
_LAST_SESSION = 2**31 - 1
_READY, _DRAINING = "ready", "draining"


class KvStore(Protocol):
    """The calls of a kvstore that the engine needs. They never raise: a failed lookup counts as a miss."""

    async def look_up(self, lookup: Lookup, hello: WorkerHello) -> LookupResult:
        """Pin the longest stored prefix of the pages in every KV group."""

    async def release(self, leases: Sequence[bytes]) -> None:
        """Release leases."""


class Engine:
    """The engine of one replica. It outlives the epochs of its worker. After each change that no Report made, such as a
    submit or an abort, it starts the core's lookups and releases and wakes the worker's link, which sends Grants and
    delivers the outputs."""

    def __init__(self, config: SchedulerConfig, kvstore: KvStore | None = None, instance: str = "") -> None:
        self.config = config
        self.instance = instance
        self.roles = Roles(config.role)
        self.core: Scheduler | None = None
        self.draining = False
        # The longest time that a waiting request has waited for a slot; updated once a second.
        self.oldest_wait_s = 0.0
        # The replica announces that it drains, but still takes requests from routers that have not heard of it.
        self._leaving = False
        # The worker is about to stop: it finishes the requests that it has, in this epoch.
        self._worker_drains = False
        self.progress = 0.0
        self.detail = "waiting for the worker"
        # Set when the phase, the progress or the model changes.
        self.phase_changed = WakeEvent()
        # Set when pages were stored or removed, and when an epoch begins or ends.
        self.pages_changed = WakeEvent()
        self._kick: Callable[[], None] = lambda: None
        self._phase = "loading"
        self._kvstore = kvstore
        self._sinks: dict[int, OutputSink] = {}
        self._next_session = 1
        self._outputs: list[SessionOutputs] = []
        # Ended requests that the metrics do not count yet, with their reasons.
        self._uncounted_requests: list[tuple[Request, str]] = []
        self._spans = RequestSpans()
        self._meter = metrics.Meter()
        self._lookups: set[asyncio.Task[None]] = set()
        self._releases: set[asyncio.Task[None]] = set()
        self._idle = WakeEvent()

    @property
    def phase(self) -> str:
        """The replica's phase: loading, ready, draining or failed. A replica that drains says so only in place of
        ready."""
        drains = self.draining or self._worker_drains or self._leaving
        return _DRAINING if drains and self._phase == _READY else self._phase

    def call_for_grants(self, kick: Callable[[], None]) -> None:
        """Have the engine call `kick`, a function of the worker's link, whenever there may be a Grant to send."""
        self._kick = kick

    def set_phase(self, phase: str, progress: float, detail: str) -> None:
        """Set the phase and how far loading has come (`progress`, 0 to 1), and wake watchers if anything changed."""
        if (phase, progress, detail) != (self._phase, self.progress, self.detail):
            self._phase, self.progress, self.detail = phase, progress, detail
            self.phase_changed.set()

    def attach(self, hello: WorkerHello) -> None:
        """Begin a new epoch: make a new core for the worker that sent the hello, and set the phase to ready. If the
        engine drains, the new core refuses requests too. The gauges that describe the engine are set, and watchers of
        pages are woken."""
        with_store = self._kvstore is not None
        self.core = Scheduler(self.config, hello, kvstore=with_store, ended=self._ended, instance=self.instance)
        self.core.names.listeners.append(self.pages_changed.set)
        self._meter = metrics.Meter()
        metrics.describe(hello, prefix_caching=self.config.enable_prefix_caching)
        self._worker_drains = False
        if self.draining:
            self.core.drain()
        self.set_phase(_READY, 1.0, hello.model.name)
        self.pages_changed.set()

    def detach(self, error: QuireError, phase: str, detail: str) -> None:
        """End the epoch, since the worker is gone. Its requests fail with the error, and their sessions are told at
        once. The leases in the kvstore are released, the phase changes, and watchers of pages are woken. Without an
        epoch, only the phase changes."""
        core, self.core = self.core, None
        self.set_phase(phase, 0.0, detail)
        if core is not None:
            self._outputs += core.worker_lost(error, now_s())
            self._meter.count(core.stats)
            self._carry_out(core)
            self.flush()
            self.pages_changed.set()

    def open_session(self, sink: OutputSink) -> int:
        """Open a session that delivers to the sink. Returns its number, which names it in `submit` and `abort`."""
        session = self._next_session
        while session in self._sinks:
            session = _after(session)
        self._next_session = _after(session)
        self._sinks[session] = sink
        return session

    def close_session(self, session: int) -> None:
        """Forget the session, which nobody listens to any more. Its requests are aborted, its transfers end (except
        those whose lease a client asked for), and its outputs are dropped. Idempotent."""
        self._sinks.pop(session, None)
        if self.core is not None:
            self.core.abort_session(session, now_s())
            self._changed()

    def submit(
        self,
        session: int,
        handle: int,
        context: RequestContext,
        sequence: TokenSequence,
        transfer: KvTransfer = NO_TRANSFER,
        held_tokens: int | None = None,
    ) -> None:
        """Give a request to the core, with its own trace span. `held_tokens` is the number of leading tokens whose
        pages some replica or kvstore has, according to the router; None: the router did not say. The context's deadline
        is of the monotonic clock. Raises Unavailable if there is no worker, and the QuireError by which the role or the
        core refuses the request; such a refusal is counted."""
        if self.core is None:
            raise self.not_ready()
        traced = self._spans.begin(session, handle, context)
        try:
            self.roles.check(transfer)
            deadline_s = from_monotonic(context.deadline_s)
            self.core.submit(session, handle, traced, sequence, now_s(), transfer, held_tokens, deadline_s)
        except QuireError as error:
            self._spans.refused(session, handle, error.code)
            metrics.refused.labels(error.code).inc()
            raise
        self._changed()

    def hand_over(self, session: int, handle: int, handover: Handover) -> None:
        """Pass a handover to the request that awaits it (see `Scheduler.hand_over`). Without a worker, nothing
        happens."""
        if self.core is not None:
            self.core.hand_over(session, handle, handover, now_s())
            self._changed()

    def end_handovers(self, session: int) -> None:
        """Let the session's requests go on without the handovers that they await, because none can come any more."""
        if self.core is not None:
            self.core.end_handovers(session, now_s())
            self._changed()

    def abort(self, session: int, handles: Sequence[int]) -> None:
        """End requests of the session; those that have ended already are ignored."""
        if self.core is not None:
            now = now_s()
            for handle in handles:
                self.core.abort(session, handle, now)
            self._changed()

    def fail(self, session: int, handle: int, error: QuireError) -> bool:
        """End a request by an error and tell its session. Returns False if the request has ended already."""
        failed = self.core is not None and self.core.fail(session, handle, error, now_s())
        if failed:
            self._changed()
        return failed

    def keep_transfers(self, renewed: Sequence[bytes], released: Sequence[bytes]) -> None:
        """Renew the leases of some transfers and end others; unknown ones are ignored."""
        if self.core is not None and (renewed or released):
            self.core.renew(renewed, now_s())
            self.core.release(released)
            self._changed()

    def ticket(self, transfer_id: bytes) -> Ticket:
        """Return the ticket of an open transfer. Raises NotFound for any other."""
        ticket = None if self.core is None else self.core.ticket(transfer_id)
        if ticket is None:
            raise NotFound(
                "TRANSFER_UNKNOWN", "No such transfer is open here.", "Prefill again; transfers end with their lease."
            )
        return ticket

    def running(self, session: int) -> int:
        """Return the number of the session's requests that have not ended."""
        return self.core.count(session) if self.core is not None else 0

    @property
    def busy(self) -> bool:
        """Whether requests hold slots, so that the worker has steps to report."""
        return self.core is not None and self.core.busy

    def model(self) -> ModelInfo:
        """Return the model, with the context length that this replica can serve. Raises Unavailable while the worker is
        away."""
        if self.core is None:
            raise self.not_ready()
        return replace(self.core.hello.model, max_model_len=self.core.max_len)

    def not_ready(self) -> Unavailable:
        """Return the Unavailable error (retry after 1 s) for requests while there is no worker."""
        return Unavailable(
            "WORKER_NOT_READY",
            "This replica's worker is not ready.",
            "Send the request to another replica, or wait.",
            retry_after_s=1.0,
        )

    def on_report(self, report: Report) -> None:
        """Apply a Report. The outputs for the sessions wait until `flush`. If the Report says that the worker drains,
        the core refuses new requests from now on, and the phase is draining. Without a core, nothing happens."""
        if self.core is not None:
            if report.draining and not self._worker_drains:
                self._worker_drains = True
                self.core.drain()
                self.phase_changed.set()
            self._outputs += self.core.on_report(report, now_s())

    def next_grant(self) -> Grant | None:
        """Return the core's next Grant, or None if there is none to send or no core. Start the lookups and releases
        that the core asks for."""
        if self.core is None:
            return None
        grant = self.core.next_grant(now_s())
        self._carry_out(self.core)
        return grant

    def flush(self) -> None:
        """Deliver the outputs to their sessions; a session whose sink takes no more is closed, with a log line. Outputs
        of unknown sessions are dropped. Then add the requests that have ended to the metrics. If the core is idle or
        there is none, wake the tasks that wait for that."""
        if self.core is not None:
            self._outputs += self.core.take_outputs()
        outputs, self._outputs = self._outputs, []
        for out in outputs:
            sink = self._sinks.get(out.session)
            if sink is not None and not sink.deliver(out):
                log.warning("session ended: it does not keep up", session=out.session)
                self.close_session(out.session)
        self._count_ended_requests()
        if self.core is None or self.core.idle:
            self._idle.set()

    async def tick(self) -> None:
        """Run for ever. Every 0.1 s, let the sinks send heartbeats, ask for a Grant (which also fails requests past
        their deadline), and update the metrics. Every second, also find out how long the oldest waiting request has
        waited. Without a core, only the heartbeats are sent, and that wait is 0."""
        for tick in itertools.count():
            await asyncio.sleep(_TICK_S)
            for sink in self._sinks.values():
                sink.beat()
            if self.core is not None:
                # The link then asks for a Grant, and the core checks deadlines before it makes one.
                self._kick()
                metrics.show(self.core.load(), self.core.cached_pages, self.core.deferred)
                self._meter.count(self.core.stats)
            if tick % _TICKS_PER_OLDEST_WAIT == 0:
                self.oldest_wait_s = self.core.oldest_wait_s(now_s()) if self.core is not None else 0.0
                metrics.show_oldest_wait(self.oldest_wait_s)

    def leave(self) -> None:
        """Announce from now on that this replica drains, so that routers place no more requests here. Requests that
        still come are accepted."""
        self._leaving = True
        self.phase_changed.set()

    async def drain(self, timeout_s: float | None) -> int:
        """Refuse new requests, and return when no request is left and no transfer is open, or when there is no worker.
        Those that remain after `timeout_s` are failed or ended; None: wait without limit. Returns the number of failed
        requests."""
        self.draining = True
        self.phase_changed.set()
        if self.core is not None:
            self.core.drain()
        return await self._until(lambda core: core.idle, lambda core: core.end_all(None, now_s()), timeout_s)

    async def set_role(self, role: str, timeout_s: float | None) -> tuple[str, int]:
        """Change the replica's role. Until the role has changed, requests that the new role does not accept are
        refused; without a change under way, a role refuses none. The role changes when all requests and transfers that
        do not fit it have ended, at once if there is no worker, and watchers of the load are woken. Those that remain
        after `timeout_s` are ended first (None: wait without limit). Returns the former role and the number of requests
        that were failed; both are logged. Raises the errors of Roles.change. If the wait is cancelled, the role
        stays."""
        former = self.roles.role
        with self.roles.change(role):
            ended = await self._until(
                lambda core: core.is_fit(role), lambda core: core.make_fit(role, role_changing(), now_s()), timeout_s
            )
        self.phase_changed.set()
        log.info("role changed", former=former, role=role, aborted=ended)
        return former, ended

    async def close(self) -> None:
        """Cancel lookups, end the core (its outputs are not delivered any more), and return when the calls that release
        its leases have ended."""
        for task in list(self._lookups):
            task.cancel()
        await asyncio.gather(*self._lookups, return_exceptions=True)
        core, self.core = self.core, None
        if core is not None:
            core.worker_lost(draining_error(), now_s())
            self._count_ended_requests()
            self._carry_out(core)
        await asyncio.gather(*self._releases, return_exceptions=True)

    async def _until(
        self, done: Callable[[Scheduler], bool], end: Callable[[Scheduler], int], timeout_s: float | None
    ) -> int:
        """Wait until `done` is true of the core or there is no core, and return 0. After `timeout_s` (None: never),
        call `end`, deliver the outputs and return the result of `end`."""
        loop = asyncio.get_running_loop()
        deadline = None if timeout_s is None else loop.time() + timeout_s
        while self.core is not None and not done(self.core):
            left = None if deadline is None else deadline - loop.time()
            if left is not None and left <= 0:
                ended = end(self.core)
                self._changed()
                self.flush()
                return ended
            await self._idle.wait(_TICK_S if left is None else min(left, _TICK_S))
        return 0

    def _changed(self) -> None:
        """Start the core's lookups and releases, and have the worker's link send Grants. Called after each change that
        no Report made."""
        if self.core is not None:
            self._carry_out(self.core)
        self._kick()

    def _carry_out(self, core: Scheduler) -> None:
        """Take the lookups and releases that the core asks for, and start them as tasks; without a kvstore they are
        dropped."""
        effects = core.take_effects()
        if self._kvstore is None:
            return
        for lookup in effects.lookups:
            _spawn(self._look_up(self._kvstore, core, lookup), self._lookups)
        if effects.releases:
            _spawn(self._kvstore.release(effects.releases), self._releases)

    async def _look_up(self, kvstore: KvStore, core: Scheduler, lookup: Lookup) -> None:
        """Ask the kvstore, give its answer to the core, start the lookups and releases that the core then asks for, and
        have the worker's link ask for a Grant. If the call raises or is cancelled, the core gets a failed lookup, and
        the exception passes on. If the core's epoch has ended, the core only releases the leases of the answer."""
        result = LookupResult(0, (), 0, 0.0, failed=True)
        try:
            result = await kvstore.look_up(lookup, core.hello)
        finally:
            # This is done even if the epoch has ended: the core must still release the pinned pages.
            core.on_lookup(lookup.uid, result)
            self._carry_out(core)
            self._kick()

    def _ended(self, request: Request, reason: str, code: str) -> None:
        """End the request's span, and note the request for `_count_ended_requests`."""
        self._uncounted_requests.append((request, reason))
        self._spans.end(request, reason, code)

    def _count_ended_requests(self) -> None:
        """Add the requests that have ended since the last call to the metrics."""
        for request, reason in self._uncounted_requests:
            metrics.ended(request, reason)
        self._uncounted_requests.clear()


def _after(session: int) -> int:
    """Return the session number after this one. Session numbers must fit int32 columns."""
    return session + 1 if session < _LAST_SESSION else 1


def _spawn(work: Coroutine[Any, Any, None], among: set[asyncio.Task[None]]) -> None:
    """Start the work as a task, and keep it in `among` until it is done."""
    task = asyncio.ensure_future(work)
    among.add(task)
    task.add_done_callback(among.discard)
