"""Scheduler: the core of one replica. It is pure and synchronous and has no transport: requests and Reports go in,
Grants and outputs come out.

    core = Scheduler(config, hello)
    core.submit(session, handle, context, sequence, now)
    grant = core.next_grant(now)            # None: there is nothing to send
    outputs = core.on_report(report, now)   # the outputs for each session

A Grant tells the worker which sequences to start and stop and how far each may run; a Report tells which steps the
worker has run. A Scheduler serves one epoch of the worker: from the worker's hello until the connection is lost. `now`
is in seconds since the Unix epoch, of a clock that does not jump.
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
    """The load of the replica: the domain form of the load fields of quire.v1.Load."""

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
    """Makes all decisions of one replica, for one epoch of its worker."""

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
        """Check a request, add it to the pending queue and watch its deadline. A request that awaits a handover and has
        no usable ticket is parked, so that no other request waits for it. A ticket that came with the request becomes a
        pull, or its session is told why not. Raises InvalidArgument if the session's request of this handle has not
        ended, and the QuireError of any check that refuses the request. Then nothing changes and no output follows.
        `held_tokens`: the number of leading tokens whose pages somebody has, as the router believes; None if unknown.
        `deadline_s` is in seconds of the same clock as `now`, infinite for no deadline; None: the deadline of the
        context, which must be of that clock too."""
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
        """Pass a handover (a ticket, tokens, or the news that nothing will come) to the request that awaits it. It is
        ignored if there is no such request, if the request was submitted without `await_handover`, or if it is no
        longer in the pending queue. A request that could not go on after the tokens fails."""
        if (request := self._replica.requests.get((session, handle))) is not None:
            self._handovers.arrived(request, handover, now)

    def end_handovers(self, session: int, now: float) -> None:
        """Let the session's requests go on without the tickets and tokens that they await, as if each had been told
        that nothing will come. Other requests are not changed."""
        for request in [r for (owner, _), r in self._replica.requests.items() if owner == session]:
            self._handovers.end(request, now)

    def abort(self, session: int, handle: int, now: float) -> bool:
        """End a request; its session gets a finished note and a row with reason ABORT. Returns False if the request has
        ended already."""
        request = self._replica.requests.get((session, handle))
        if request is None:
            return False
        self._lifecycle.abort(request, now)
        return True

    def fail(self, session: int, handle: int, error: QuireError, now: float) -> bool:
        """End a request by an error, and tell its session. Returns False if the request has ended already."""
        request = self._replica.requests.get((session, handle))
        if request is None:
            return False
        self._lifecycle.fail(request, error, now)
        return True

    def abort_session(self, session: int, now: float) -> int:
        """Abort all requests of a session whose router has left, drop its outputs, and end its transfers: those of the
        aborted requests as failed, the others as released, except those whose lease a client asked for. Returns the
        number of aborted requests."""
        handles = [handle for owner, handle in self._replica.requests if owner == session]
        for handle in handles:
            self.abort(session, handle, now)
        self._replica.transfers.end_session(session)
        self._replica.outputs.forget(session)
        return len(handles)

    def on_report(self, report: Report, now: float) -> list[SessionOutputs]:
        """Apply a Report. Return all outputs since they were last taken, one entry per session, and clear them. A
        heartbeat or a Report of another epoch is not applied, but the outputs are returned."""
        if report.epoch == self._replica.hello.epoch and not report.heartbeat:
            self._policy.reported(report)
            self._output_processor.update_from_report(report, now)
        return self._replica.outputs.take_outputs()

    def next_grant(self, now: float) -> Grant | None:
        """Expire deadlines and leases, then plan and return the next Grant; None while there is nothing to send. Call
        it after every call of another method, until it returns None."""
        self.expire(now)
        return self._planner.plan_grant(now)

    def on_lookup(self, uid: int, result: LookupResult) -> None:
        """Take the kvstore's answer to the lookup of request `uid`, and make the request READY. A failed lookup is a
        result without pages. If the request has left, the leases of the answer are released. In any case, the answer
        counts for the circuit breaker of lookups."""
        request = self._replica.waiting.end_lookup(uid)
        self._replica.kv.take_answer(request, result)
        if request is not None:
            self._replica.waiting.make_ready(request)

    def ticket(self, transfer_id: bytes) -> Ticket | None:
        """Return the ticket of an open transfer; None if no such transfer is open."""
        return self._replica.transfers.find_ticket(transfer_id)

    def renew(self, transfer_ids: Iterable[bytes], now: float) -> None:
        """Renew the leases of these transfers, which an engine still waits to pull; unknown ids are ignored."""
        self._replica.transfers.renew_leases(transfer_ids, now)

    def release(self, transfer_ids: Iterable[bytes]) -> None:
        """End these transfers, which nobody will pull any more; unknown ids are ignored."""
        self._replica.transfers.release_transfers(transfer_ids)

    def expire(self, now: float) -> None:
        """End the transfers whose lease nobody has renewed, and fail the requests whose deadline has passed with
        DeadlineExceeded."""
        self._replica.transfers.expire_leases(now)
        for request in self._replica.deadlines.take_expired(now):
            self._lifecycle.fail(request, deadline_error(), now)

    def take_outputs(self) -> list[SessionOutputs]:
        """Return the outputs since they were last taken, and clear them: admissions, ends of pulls, aborts and
        failures."""
        return self._replica.outputs.take_outputs()

    def take_effects(self) -> Effects:
        """Return the lookups and releases that the caller must carry out. Call it after every call of another
        method."""
        return self._replica.kv.take_effects()

    def drain(self) -> None:
        """Refuse new requests from now on; those that are here, waiting ones too, go on. The replica is drained when it
        is `idle`."""
        self._replica.admission.drain()

    def end_all(self, error: QuireError | None, now: float) -> int:
        """Fail every request with the error (None: the error of a draining replica), and end all transfers. Returns the
        number of requests that failed."""
        requests = list(self._replica.requests.values())
        for request in requests:
            self._lifecycle.fail(request, error or draining_error(), now)
        self._replica.transfers.end_all()
        return len(requests)

    def is_fit(self, role: str) -> bool:
        """Whether a replica of the role is meant for all requests and transfers that are here. Open transfers fit only
        a role that prefills for other replicas."""
        exports = len(self._replica.transfers) and not takes(role, PREFILL_ONLY)
        return not exports and all(takes(role, request.transfer) for request in self._replica.requests.values())

    def make_fit(self, role: str, error: QuireError, now: float) -> int:
        """Fail the requests that a replica of the role is not meant for, and end all transfers, as failed, if the role
        does not prefill for other replicas. Returns the number of requests that failed. Called when they were given
        time to end by themselves, and have not."""
        requests = [r for r in self._replica.requests.values() if not takes(role, r.transfer)]
        for request in requests:
            self._lifecycle.fail(request, error, now)
        if not takes(role, PREFILL_ONLY):
            self._replica.transfers.end_all()
        return len(requests)

    def worker_lost(self, error: QuireError, now: float) -> list[SessionOutputs]:
        """End the epoch: fail every request with the error, end all transfers, and add the leases in the kvstore to the
        effects, by which they are released. Returns the outputs for the sessions. Afterwards only `stats`,
        `take_effects` and, for lookups that are still under way, `on_lookup` may be used."""
        self.end_all(error, now)
        self._replica.kv.handle_worker_loss()
        self._replica.pulls.handle_worker_loss()
        return self._replica.outputs.take_outputs()

    def count(self, session: int) -> int:
        """Return the number of the session's requests that have not ended."""
        return sum(owner == session for owner, _ in self._replica.requests)

    @property
    def idle(self) -> bool:
        """Whether no request waits or runs, and no transfer is open."""
        return not self._replica.requests and not len(self._replica.transfers)

    @property
    def busy(self) -> bool:
        """Whether any request holds a slot."""
        return self._replica.slots.num_active > 0

    @property
    def quiet(self) -> bool:
        """Whether the core is idle and no move, lease or stop is outstanding, so that no page is referenced."""
        return self.idle and self._replica.kv.idle and not len(self._replica.moves) and not self._replica.stops

    @property
    def stats(self) -> Stats:
        """The counters of this core."""
        return self._replica.stats

    @property
    def names(self) -> PageNames:
        """The names of pages, and the events of their changes."""
        return self._replica.names

    @property
    def max_len(self) -> int:
        """The largest number of tokens that prompt and output may have together."""
        return self._replica.admission.max_len

    @property
    def hello(self) -> WorkerHello:
        """The hello by which the worker introduced itself."""
        return self._replica.hello

    def load(self) -> LoadFigures:
        """Return the load of the replica. Sequences that hold a slot ahead of need count as waiting. The page counts
        are those of the KV group with the fewest free pages. The token rates are 0.0 while no request holds a slot."""
        replica, rates = self._replica, self._replica.rates
        pool = min(replica.pools.pools, key=lambda p: p.free)
        # A sequence that was started ahead of need still waits, though it has a slot.
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
        """The number of waiting requests that wait for the kvstore, for another engine or, set aside, for room to pull,
        and not for a slot."""
        return self._replica.waiting.deferred

    def oldest_wait_s(self, now: float) -> float:
        """Return the longest time, in seconds, that any waiting request has waited; 0.0 if none waits. The wait of a
        preempted request begins at its preemption."""
        waiting = [request.timing.waiting_since_s for request in self._replica.requests.values() if request.waits]
        return max(0.0, now - min(waiting)) if waiting else 0.0

    @property
    def cached_pages(self) -> int:
        """The number of free pages, in the KV group with the fewest free ones, that still hold a named prefix."""
        return min(self._replica.pools.pools, key=lambda p: p.free).idle

    def check_integrity(self) -> None:
        """Raise AssertionError unless the parts agree with one another (see `Replica.check_integrity`). Only tests call
        it."""
        self._replica.check_integrity()
