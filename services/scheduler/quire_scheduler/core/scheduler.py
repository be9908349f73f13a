"""One replica's core: requests in, Grants out; Reports in, outputs out. Pure and synchronous, with no transport.

    core = Scheduler(config, hello)
    core.submit(session, handle, context, sequence, now)
    grant = core.next_grant(now)            # None: nothing to say
    outputs = core.on_report(report, now)   # what each session must be told

It lives for one epoch of the worker. `now` is seconds since the Unix epoch from a clock that does not jump.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from quire_common.errors import InvalidArgument, QuireError
from quire_scheduler.batching.credit import Credit
from quire_scheduler.batching.lockstep import Lockstep
from quire_scheduler.batching.planner import Planner
from quire_scheduler.core.lifecycle import Lifecycle
from quire_scheduler.core.output_processor import OutputProcessor
from quire_scheduler.core.replica import Replica
from quire_scheduler.core.request import Request
from quire_scheduler.core.request_checks import deadline_error, draining_error
from quire_scheduler.core.roles import takes
from quire_scheduler.disaggregation.handover import NO_TRANSFER, PREFILL_ONLY
from quire_scheduler.disaggregation.handovers import Handovers
from quire_scheduler.kv.page_identity import identify

if TYPE_CHECKING:
    from collections.abc import Iterable

    from quire_common.credit import Grant, Report, WorkerHello
    from quire_common.sequence import RequestContext, Sequence
    from quire_common.ticket import KvTransfer, Ticket
    from quire_scheduler.batching.grant_policy import GrantPolicy
    from quire_scheduler.config import SchedulerConfig
    from quire_scheduler.core.lifecycle import Ended
    from quire_scheduler.core.outputs import SessionOutputs
    from quire_scheduler.core.stats import Stats
    from quire_scheduler.disaggregation.handover import Handover
    from quire_scheduler.kv.kv_traffic import Effects, LookupResult
    from quire_scheduler.kv.page_names import PageNames


class LoadFigures(NamedTuple):
    """How busy the replica is, and where; the domain form of what quire.v1.Load says of that."""

    running: int
    waiting: int
    max_num_seqs: int
    pages: int
    free_pages: int
    referenced_pages: int
    waiting_prefill_tokens: int
    decode_tokens_per_s: float
    prefill_tokens_per_s: float
    step_ms: float
    open_transfers: int
    pull_bytes_per_s: float
    near_pull_bytes_per_s: float
    host: bytes
    kvstore_boot_id: int


class Scheduler:
    """The brain of one engine replica, for one epoch of its worker."""

    def __init__(
        self,
        config: SchedulerConfig,
        hello: WorkerHello,
        policy: GrantPolicy | None = None,
        *,
        kvstore: bool = False,
        ended: Ended | None = None,
        instance: str = "",
    ) -> None:
        self._replica = Replica(config, hello, kvstore=kvstore, instance=instance)
        self._policy: GrantPolicy = policy or (Lockstep if config.lockstep else Credit)(config, hello)
        self._lifecycle = Lifecycle(self._replica, ended)
        self._planner = Planner(self._replica, self._lifecycle, self._policy)
        self._output_processor = OutputProcessor(self._replica, self._lifecycle)
        self._handovers = Handovers(self._replica, self._lifecycle)
        self._next_uid = 1

    def submit(
        self,
        session: int,
        handle: int,
        context: RequestContext,
        sequence: Sequence,
        now: float,
        transfer: KvTransfer = NO_TRANSFER,
        held_tokens: int | None = None,
        deadline_s: float | None = None,
    ) -> None:
        """Take a request into the queue. Raises the QuireError that refuses it; then no output follows. `held_tokens`:
        see Request. `deadline_s` is on the clock of `now`, infinite for none; None: the context's, which is then on
        that clock too."""
        replica = self._replica
        if (session, handle) in replica.requests:
            raise InvalidArgument(
                "HANDLE_IN_USE", f"Handle {handle} names a request that still runs.", "Choose a new handle."
            )
        transfer.check()
        if deadline_s is None:
            deadline_s = context.deadline_s
        replica.admission.check_request(context, sequence, deadline_s, now)
        request = Request.new(self._next_uid, session, handle, context, sequence, now, transfer, held_tokens)
        self._next_uid += 1
        if replica.identifies:
            identify(request, replica.page_size)
        replica.requests[session, handle] = request
        replica.waiting.enter(request, aside=self._handovers.submitted(request))
        replica.deadlines.watch_deadline(request, deadline_s)

    def hand_over(self, session: int, handle: int, handover: Handover, now: float) -> None:
        """Give a request that awaits it a ticket, tokens, or the news that nothing will come; other requests ignore
        it."""
        if (request := self._replica.requests.get((session, handle))) is not None:
            self._handovers.arrived(request, handover, now)

    def abort(self, session: int, handle: int, now: float) -> bool:
        """End a request; its session is told by a row with reason ABORT. Returns False where it has ended already."""
        request = self._replica.requests.get((session, handle))
        if request is None:
            return False
        self._lifecycle.abort(request, now)
        return True

    def fail(self, session: int, handle: int, error: QuireError, now: float) -> bool:
        """End a request by an error, which its session is told. Returns False where it has ended already."""
        request = self._replica.requests.get((session, handle))
        if request is None:
            return False
        self._lifecycle.fail(request, error, now)
        return True

    def abort_session(self, session: int, now: float) -> int:
        """End all requests and transfers of a session that nobody listens to any more, and drop its outputs. Returns
        how many requests were ended."""
        handles = [handle for owner, handle in self._replica.requests if owner == session]
        for handle in handles:
            self.abort(session, handle, now)
        self._replica.transfers.end_session(session)
        self._replica.outputs.forget(session)
        return len(handles)

    def on_report(self, report: Report, now: float) -> list[SessionOutputs]:
        """Apply a Report, and return what sessions must be told. A heartbeat, or a Report of another epoch, is not
        applied."""
        if report.epoch == self._replica.hello.epoch and not report.heartbeat:
            self._policy.reported(report)
            self._output_processor.update_from_report(report, now)
        return self._replica.outputs.take_outputs()

    def next_grant(self, now: float) -> Grant | None:
        """The next Grant, or None while there is nothing to say. Call after every other call, until None."""
        self.expire(now)
        return self._planner.plan_grant(now)

    def on_lookup(self, uid: int, result: LookupResult) -> None:
        """Take the kvstore's answer to a Lookup and make its request READY. A failure is a result without pages; the
        leases of a request that has left are released."""
        request = self._replica.waiting.end_lookup(uid)
        self._replica.kv.take_answer(request, result)
        if request is not None:
            self._replica.waiting.make_ready(request)

    def ticket(self, transfer_id: bytes) -> Ticket | None:
        """The ticket of a transfer that is open."""
        return self._replica.transfers.find_ticket(transfer_id)

    def renew(self, transfer_ids: Iterable[bytes], now: float) -> None:
        """Renew the leases of these transfers, which somebody still waits to pull; unknown ones are ignored."""
        self._replica.transfers.renew_leases(transfer_ids, now)

    def release(self, transfer_ids: Iterable[bytes]) -> None:
        """End these transfers, which nobody will pull any more; unknown ones are ignored."""
        self._replica.transfers.release_transfers(transfer_ids)

    def expire(self, now: float) -> None:
        """Fail requests that have passed their deadline, and end transfers whose lease nobody has renewed."""
        self._replica.transfers.expire_leases(now)
        for request in self._replica.deadlines.take_expired(now):
            self._lifecycle.fail(request, deadline_error(), now)

    def take_outputs(self) -> list[SessionOutputs]:
        """What sessions must be told since the last Report: admissions, aborts, failures."""
        return self._replica.outputs.take_outputs()

    def take_effects(self) -> Effects:
        """Lookups and releases to carry out; call after every other call."""
        return self._replica.kv.take_effects()

    def drain(self) -> None:
        """Refuse new requests from now on; the admitted go on. Drained when `idle`."""
        self._replica.admission.drain()

    def end_all(self, error: QuireError | None, now: float) -> int:
        """Fail every request with the error, or as draining where it is None, and end all transfers. Returns how many
        requests."""
        requests = list(self._replica.requests.values())
        for request in requests:
            self._lifecycle.fail(request, error or draining_error(), now)
        self._replica.transfers.end_all()
        return len(requests)

    def is_fit(self, role: str) -> bool:
        """Whether no request and no transfer is here that a replica of the role is not meant for."""
        exports = len(self._replica.transfers) and not takes(role, PREFILL_ONLY)
        return not exports and all(takes(role, request.transfer) for request in self._replica.requests.values())

    def make_fit(self, role: str, error: QuireError, now: float) -> int:
        """Fail the requests that a replica of the role is not meant for, and end all transfers if it does not prefill
        for others. Returns how many requests."""
        requests = [r for r in self._replica.requests.values() if not takes(role, r.transfer)]
        for request in requests:
            self._lifecycle.fail(request, error, now)
        if not takes(role, PREFILL_ONLY):
            self._replica.transfers.end_all()
        return len(requests)

    def worker_lost(self, error: QuireError, now: float) -> list[SessionOutputs]:
        """End the epoch: fail every request, and release the leases held in the kvstore. Returns what sessions must be
        told. Only `take_effects` is of use afterwards."""
        self.end_all(error, now)
        self._replica.kv.lost()
        self._replica.pulls.lost()
        return self._replica.outputs.take_outputs()

    def count(self, session: int) -> int:
        """Requests of a session that have not ended."""
        return sum(owner == session for owner, _ in self._replica.requests)

    @property
    def idle(self) -> bool:
        """No request waits or runs, and nobody may pull pages."""
        return not self._replica.requests and not len(self._replica.transfers)

    @property
    def busy(self) -> bool:
        """Slots are held."""
        return self._replica.slots.num_active > 0

    @property
    def quiet(self) -> bool:
        """Idle, and no page is referenced: stores have been reported too."""
        return self.idle and self._replica.kv.idle and not len(self._replica.moves) and not self._replica.stops

    @property
    def stats(self) -> Stats:
        """Counters."""
        return self._replica.stats

    @property
    def names(self) -> PageNames:
        """Named pages and their events."""
        return self._replica.names

    @property
    def max_len(self) -> int:
        """Longest prompt and output together."""
        return self._replica.admission.max_len

    @property
    def hello(self) -> WorkerHello:
        """The worker, as it introduced itself."""
        return self._replica.hello

    def load(self) -> LoadFigures:
        """Return how busy the replica is. Sequences that were started ahead count as waiting; pages are those of the KV
        group with the fewest free."""
        replica, rates = self._replica, self._replica.rates
        pool = min(replica.pools.pools, key=lambda p: p.free)
        # What was started ahead waits still, if in a slot.
        running = min(replica.slots.num_active, self._policy.rows)
        return LoadFigures(
            running=running,
            waiting=len(replica.waiting) + replica.slots.num_active - running,
            max_num_seqs=self._policy.rows,
            pages=pool.capacity,
            free_pages=pool.free,
            referenced_pages=pool.referenced,
            waiting_prefill_tokens=replica.waiting_tokens() + replica.slots.waiting_tokens(),
            decode_tokens_per_s=rates.decode_tokens_per_s if self.busy else 0.0,
            prefill_tokens_per_s=rates.prefill_tokens_per_s if self.busy else 0.0,
            step_ms=rates.step_ms,
            open_transfers=len(replica.transfers),
            pull_bytes_per_s=replica.pulls.bytes_per_s,
            near_pull_bytes_per_s=replica.pulls.near_bytes_per_s,
            host=replica.hello.host,
            kvstore_boot_id=replica.kv.watched_boot_id,
        )

    @property
    def deferred(self) -> int:
        """How many of the waiting requests wait for the kvstore or another engine, not for a slot."""
        return self._replica.waiting.deferred

    def oldest_wait_s(self, now: float) -> float:
        """Return how long the request has waited that waits longest; 0.0 if none does. A request that was preempted
        waits since then."""
        waiting = [request.timing.waiting_since_s for request in self._replica.requests.values() if request.waits]
        return max(0.0, now - min(waiting)) if waiting else 0.0

    @property
    def cached_pages(self) -> int:
        """Free pages of the fullest KV group that still hold a named prefix."""
        return min(self._replica.pools.pools, key=lambda p: p.free).idle

    def check_integrity(self) -> None:
        """All parts agree with one another; for idle moments and tests."""
        self._replica.check_integrity()
