"""The loop around the core: sessions on one side, the worker's link on the other, lookups and releases beside.

Owns the core of the present epoch, or none while the worker is away. Everything here runs in one event loop; the core
is called synchronously. Knows nothing of protobuf.
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
# Looking for the oldest request takes a look at each.
_TICKS_PER_OLDEST_WAIT = 10
_LAST_SESSION = 2**31 - 1
_READY, _DRAINING = "ready", "draining"


class KvStore(Protocol):
    """What the engine needs of a kvstore. Never raises: failures are misses."""

    async def look_up(self, lookup: Lookup, hello: WorkerHello) -> LookupResult:
        """Pin the longest stored prefix in every group."""

    async def release(self, leases: Sequence[bytes]) -> None:
        """Give leases back."""


class Engine:
    """One replica, over all epochs of its worker."""

    def __init__(self, config: SchedulerConfig, kvstore: KvStore | None = None, instance: str = "") -> None:
        self.config = config
        self.instance = instance
        self.roles = Roles(config.role)
        self.core: Scheduler | None = None
        self.draining = False
        # How long a request has waited for a slot that has waited longest; looked for once a second.
        self.oldest_wait_s = 0.0
        # It says that it drains, and still takes requests from routers that have not heard of it.
        self._leaving = False
        # The worker stops: it finishes what it holds, in this epoch.
        self._worker_drains = False
        self.progress = 0.0
        self.detail = "waiting for the worker"
        # Rings when phase, progress or the model change.
        self.phase_changed = WakeEvent()
        # Rings when pages were stored or removed, and at a new epoch.
        self.pages_changed = WakeEvent()
        self._kick: Callable[[], None] = lambda: None
        self._phase = "loading"
        self._kvstore = kvstore
        self._sinks: dict[int, OutputSink] = {}
        self._next_session = 1
        self._outputs: list[SessionOutputs] = []
        self._spans = RequestSpans()
        self._meter = metrics.Meter()
        self._lookups: set[asyncio.Task[None]] = set()
        self._releases: set[asyncio.Task[None]] = set()
        self._idle = WakeEvent()

    @property
    def phase(self) -> str:
        """loading, ready, draining or failed."""
        drains = self.draining or self._worker_drains or self._leaving
        return _DRAINING if drains and self._phase == _READY else self._phase

    def call_for_grants(self, kick: Callable[[], None]) -> None:
        """The link's `kick` is called whenever there may be a Grant to send."""
        self._kick = kick

    def set_phase(self, phase: str, progress: float, detail: str) -> None:
        """Tell watchers how far the worker is."""
        if (phase, progress, detail) != (self._phase, self.progress, self.detail):
            self._phase, self.progress, self.detail = phase, progress, detail
            self.phase_changed.set()

    def attach(self, hello: WorkerHello) -> None:
        """Begin a new epoch with a new core for the worker that said hello. The phase becomes ready."""
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
        """End the epoch, since the worker is gone: its requests fail with the error, its leases are released, and
        watchers see the new phase."""
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
        """Forget the session, which nobody listens to any more, and abort its requests. Idempotent."""
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
        """Give a request to the core, with a trace span of its own. `held_tokens`: leading tokens whose pages somebody
        has, as the router believes; None: it did not say. Raises Unavailable if there is no worker, and the QuireError
        of a role or core that refuses the request."""
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
        """Pass a handover to the request that awaits it; others ignore it."""
        if self.core is not None:
            self.core.hand_over(session, handle, handover, now_s())
            self._changed()

    def abort(self, session: int, handles: Sequence[int]) -> None:
        """End requests of the session; those that have ended already are ignored."""
        if self.core is not None:
            now = now_s()
            for handle in handles:
                self.core.abort(session, handle, now)
            self._changed()

    def fail(self, session: int, handle: int, error: QuireError) -> bool:
        """End a request by an error, which its session is told. Returns False where it has ended already."""
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
        """Requests of the session that have not ended."""
        return self.core.count(session) if self.core is not None else 0

    @property
    def busy(self) -> bool:
        """Slots are held: the worker has steps to report."""
        return self.core is not None and self.core.busy

    def model(self) -> ModelInfo:
        """The model with the context that this replica can serve; raises Unavailable while the worker is away."""
        if self.core is None:
            raise self.not_ready()
        return replace(self.core.hello.model, max_model_len=self.core.max_len)

    def not_ready(self) -> Unavailable:
        """Return the error for requests while there is no worker."""
        return Unavailable(
            "WORKER_NOT_READY",
            "This replica's worker is not ready.",
            "Send the request to another replica, or wait.",
            retry_after_s=1.0,
        )

    def on_report(self, report: Report) -> None:
        """Apply a Report; what sessions must be told waits for `flush`. Where the worker drains, the core refuses new
        requests from now on."""
        if self.core is not None:
            if report.draining and not self._worker_drains:
                self._worker_drains = True
                self.core.drain()
                self.phase_changed.set()
            self._outputs += self.core.on_report(report, now_s())

    def next_grant(self) -> Grant | None:
        """Return the core's next Grant, or None, and carry out the lookups and releases that the core asks for."""
        if self.core is None:
            return None
        grant = self.core.next_grant(now_s())
        self._carry_out(self.core)
        return grant

    def flush(self) -> None:
        """Deliver to sessions what they must be told; sessions that cannot keep up are ended. Wakes whoever waits for
        the core to be idle."""
        if self.core is not None:
            self._outputs += self.core.take_outputs()
        outputs, self._outputs = self._outputs, []
        for out in outputs:
            sink = self._sinks.get(out.session)
            if sink is not None and not sink.deliver(out):
                log.warning("session ended: it does not keep up", session=out.session)
                self.close_session(out.session)
        if self.core is None or self.core.idle:
            self._idle.set()

    async def tick(self) -> None:
        """Run for ever: every 0.1 s sinks may send a heartbeat, a Grant is asked for, which fails requests past their
        deadline, and metrics are updated."""
        for tick in itertools.count():
            await asyncio.sleep(_TICK_S)
            for sink in self._sinks.values():
                sink.beat()
            if self.core is not None:
                # Whoever is kicked makes a Grant if there is one to make, which begins with deadlines.
                self._kick()
                metrics.show(self.core.load(), self.core.cached_pages, self.core.deferred)
                self._meter.count(self.core.stats)
            if tick % _TICKS_PER_OLDEST_WAIT == 0:
                self.oldest_wait_s = self.core.oldest_wait_s(now_s()) if self.core is not None else 0.0
                metrics.show_oldest_wait(self.oldest_wait_s)

    def leave(self) -> None:
        """Say from now on that this replica drains, so that routers place nothing more here; what comes is still
        taken."""
        self._leaving = True
        self.phase_changed.set()

    async def drain(self, timeout_s: float | None) -> int:
        """Refuse new requests, and return when none is left. After `timeout_s` (None: never) those that still run are
        failed. Returns how many were."""
        self.draining = True
        self.phase_changed.set()
        if self.core is not None:
            self.core.drain()
        return await self._until(lambda core: core.idle, lambda core: core.end_all(None, now_s()), timeout_s)

    async def set_role(self, role: str, timeout_s: float | None) -> tuple[str, int]:
        """Refuse requests that the role does not take, wait until those that are here have ended, then change the role.
        After `timeout_s` (None: never) they are failed. Returns the former role and how many were failed; raises as
        Roles.change."""
        former = self.roles.role
        with self.roles.change(role):
            ended = await self._until(
                lambda core: core.is_fit(role), lambda core: core.make_fit(role, role_changing(), now_s()), timeout_s
            )
        self.phase_changed.set()
        log.info("role changed", former=former, role=role, aborted=ended)
        return former, ended

    async def close(self) -> None:
        """Cancel lookups, end the core, and return when all its leases were given back."""
        for task in list(self._lookups):
            task.cancel()
        await asyncio.gather(*self._lookups, return_exceptions=True)
        core, self.core = self.core, None
        if core is not None:
            core.worker_lost(draining_error(), now_s())
            self._carry_out(core)
        await asyncio.gather(*self._releases, return_exceptions=True)

    async def _until(
        self, done: Callable[[Scheduler], bool], end: Callable[[Scheduler], int], timeout_s: float | None
    ) -> int:
        """Wait until the core is done, or there is none, and return 0. When the time is over, call `end` and return its
        result."""
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
        """Something was asked for outside a Report: there may be a Grant to send, or something to tell."""
        if self.core is not None:
            self._carry_out(self.core)
        self._kick()

    def _carry_out(self, core: Scheduler) -> None:
        """Start the lookups and releases that the core asks for, as tasks; without a kvstore do nothing."""
        effects = core.take_effects()
        if not effects or self._kvstore is None:
            return
        for lookup in effects.lookups:
            _spawn(self._look_up(self._kvstore, core, lookup), self._lookups)
        if effects.releases:
            _spawn(self._kvstore.release(effects.releases), self._releases)

    async def _look_up(self, kvstore: KvStore, core: Scheduler, lookup: Lookup) -> None:
        """Ask the kvstore and give its answer to the core; a call that raises or is cancelled counts as failed. Where
        the core's epoch is over, only the leases found are released."""
        result = LookupResult(0, (), 0, 0.0, failed=True)
        try:
            result = await kvstore.look_up(lookup, core.hello)
        finally:
            # Also of an epoch that is over: then all that is left to do is to release what was pinned.
            core.on_lookup(lookup.uid, result)
            self._carry_out(core)
            self._kick()

    def _ended(self, request: Request, reason: str, code: str) -> None:
        metrics.ended(request, reason)
        self._spans.end(request, reason, code)


def _after(session: int) -> int:
    """The next session number: columns of int32 carry them."""
    return session + 1 if session < _LAST_SESSION else 1


def _spawn(work: Coroutine[Any, Any, None], among: set[asyncio.Task[None]]) -> None:
    task = asyncio.ensure_future(work)
    among.add(task)
    task.add_done_callback(among.discard)
