"""The router's placement over simulated replicas, in virtual time. Table, directory, policies and bookkeeping are the
real ones.

Reports reach the router as late as in production: load and rates every 200 ms, page events every 100 ms, first tokens
at once. With roles, the router itself decides which requests another replica prefills. The first token of such a
request comes from the prefill side. While the prompt is computed, the pages that the decode side lacks are transferred
over one link per decode side.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from bench.placement.links import Links
from bench.placement.replica import Run, SimReplica, Speed
from quire_common.credit.hello import KvGroup, ModelInfo, PageGeometry
from quire_common.sequence import Sequence, Stop
from quire_router.pages.page_directory import PageDirectory
from quire_router.placement.disaggregation import Disaggregation, SplitOptions
from quire_router.placement.load import Load
from quire_router.placement.placement_request import PlacementRequest
from quire_router.placement.placer import Placer
from quire_router.placement.prefix_view import PrefixView
from quire_router.placement.registry import PAGE_AWARE, Weights, policies
from quire_router.placement.replica_table import ReplicaTable

if TYPE_CHECKING:
    from collections.abc import Sequence as Sequence_

    from numpy.typing import NDArray

    from bench.placement.trace import TraceRequest
    from quire_router.pages.page_table import Keys
    from quire_router.placement.load_reservation import LoadReservation
    from quire_router.placement.placer import ReservedSides
    from quire_router.placement.replica_table import PagePool, ReplicaRow

_TICK_S, _LOAD_S, _EVENTS_S = 0.02, 0.2, 0.1
# Of a replica's own means; see the scheduler's Rates.
_HORIZON_S = 5.0
_NO_TOKENS: NDArray[np.int32] = np.empty(0, np.int32)


@dataclass(frozen=True)
class Setup:
    """The simulated fleet. `prefill` of the `replicas` prefill, and the others decode; 0: all do both. `bandwidth` is
    in bytes per second into a decode side, and `near_bandwidth` is the bandwidth from its own host. `per_host` replicas
    share a host, with the same number of each role; 0: no two share one. `tells_hosts`: the router learns the hosts."""

    policy: str = "kv_aware"
    replicas: int = 16
    prefill: int = 0
    speed: Speed = field(default_factory=Speed)
    bandwidth: float = 25e9
    near_bandwidth: float = 200e9
    per_host: int = 0
    tells_hosts: bool = True
    token_bytes: int = 131_072
    weights: Weights = field(default_factory=Weights)
    split: SplitOptions = field(default_factory=SplitOptions)


@dataclass
class Outcome:
    """The outcomes of the requests, in the order of arrival, and the CPU seconds of decisions. `apart` is the number of
    requests whose prompt another replica computed. `seconds` are the times of these requests from the first token to
    the second."""

    runs: list[Run]
    gaps: list[tuple[float, int]]
    decisions_s: list[float]
    makespan_s: float
    busy: float
    apart: int
    seconds: list[float]


class _KnownRequest(PlacementRequest):
    """A request whose pages have names already. Another benchmark measures hashing (bench.router.page_index)."""

    __slots__ = ("keys", "known")

    def __init__(self, request: TraceRequest) -> None:
        super().__init__(Sequence(_NO_TOKENS, Stop(1)))
        self.known, self.keys = request.input_tokens, request.keys

    @property
    def tokens(self) -> int:
        return self.known

    def chains(self, pool: PagePool) -> Sequence_[Keys]:
        return [self.keys]


class _Member:
    """A replica, its row, and the reports that it sends."""

    def __init__(self, replica: SimReplica, row: ReplicaRow, host: bytes, *, tells_host: bool) -> None:
        self.replica = replica
        self.host = host
        self._told_host = host if tells_host else b""
        self.row = row
        self._tokens = self._span_s = 0.0
        self._told = (0, 0.0)

    def tell_load(self) -> None:
        replica = self.replica
        tokens, busy_s = replica.prefilled_tokens - self._told[0], replica.busy_s - self._told[1]
        self._told = replica.prefilled_tokens, replica.busy_s
        keep = max(0.0, 1.0 - busy_s / _HORIZON_S)
        self._tokens, self._span_s = self._tokens * keep + tokens, self._span_s * keep + busy_s
        rate = self._tokens / self._span_s if self._span_s else 0.0
        self.row.set_load(
            Load(
                "ready",
                running=replica.running,
                waiting=replica.queued,
                max_num_seqs=replica.speed.rows,
                waiting_prefill_tokens=replica.waiting_tokens,
                prefill_tokens_per_s=rate,
                host=self._told_host,
            )
        )

    def tell_prefill(self, run: Run) -> None:
        self.row.measure_prefill(
            run.request.input_tokens - run.cached_tokens, round((run.first_s - run.started_s) * 1e6)
        )

    def tell_pull(self, pages: int, took_s: float, *, near: bool) -> None:
        self.row.measure_pull(pages, round(took_s * 1e6), near=near and bool(self._told_host))

    def tell_pages(self, directory: PageDirectory, holder: int) -> None:
        # Of a page that came and went since the last frame, the last word counts.
        stored = [key for key in self.replica.stored if self.replica.has(key)]
        gone = [key for key in self.replica.removed if not self.replica.has(key)]
        if stored:
            directory.add(holder, np.array(stored, np.uint64))
        if gone:
            directory.remove(holder, np.array(gone, np.uint64))


class _Fleet:
    """All replicas, and the router's placer for them."""

    def __init__(self, setup: Setup, clock: list[float]) -> None:
        self.table = ReplicaTable()
        self.directory = PageDirectory(setup.speed.pages * setup.replicas, 10.0)
        view = PrefixView(self.table, self.directory, lambda: clock[0])
        named = policies(setup.policy, self.table, view, setup.weights)
        self.listens = setup.policy in PAGE_AWARE
        known = view if self.listens else None
        split = Disaggregation(self.table, named, setup.split, known) if setup.prefill else None
        self.placer = Placer(self.table, named, known, split)
        page_bytes = setup.token_bytes * setup.speed.page
        group = KvGroup("full", page_bytes, "layout", "bf16", 1, 1, 1)
        model = ModelInfo("m", "A", 1 << 20, 1 << 17, (), b"d", PageGeometry(setup.speed.page, (group,), b"n" * 32))
        self.links = Links(setup.replicas, setup.bandwidth, setup.near_bandwidth, page_bytes)
        hosts = setup.replicas // setup.per_host if setup.per_host else 0
        self.members: list[_Member] = []
        for index in range(setup.replicas):
            role = "both" if not setup.prefill else "prefill" if index < setup.prefill else "decode"
            row = self.table.add(f"replica-{index}")
            row.publish(accepts=True, model=model, role=role)
            row.set_holder(self.directory.open())
            host = b"host %d" % (index % hosts) if hosts else b""
            self.members.append(_Member(SimReplica(setup.speed), row, host, tells_host=setup.tells_hosts))
        self.hear_load()

    def place(self, request: TraceRequest) -> ReservedSides:
        return self.placer.place_sides(_KnownRequest(request), self.table.accepting_rows("m", None, 0))

    def are_near(self, one: int, other: int) -> bool:
        """Whether two replicas share a host."""
        host = self.members[one].host
        return bool(host) and host == self.members[other].host

    def hear_load(self) -> None:
        for member in self.members:
            member.tell_load()

    def hear_pages(self) -> None:
        for member in self.members:
            if self.listens:
                member.tell_pages(self.directory, int(self.table.holder[member.row.row]))
            member.replica.stored.clear()
            member.replica.removed.clear()


def simulate(requests: Sequence_[TraceRequest], setup: Setup) -> Outcome:
    """Replay the requests until the last has ended."""
    clock = [0.0]
    fleet = _Fleet(setup, clock)
    replicas, links = [member.replica for member in fleet.members], fleet.links
    placed: dict[int, LoadReservation] = {}
    decoders: dict[int, LoadReservation] = {}
    runs: list[Run] = []
    decisions: list[float] = []
    twins: dict[int, Run] = {}
    ended = at = ticks = apart = 0
    while ended < len(requests):
        ticks += 1
        until_s = ticks * _TICK_S
        while at < len(requests) and requests[at].arrival_s <= until_s:
            request = requests[at]
            clock[0] = request.arrival_s
            started = time.thread_time()
            decode, prefill = fleet.place(request)
            decisions.append(time.thread_time() - started)
            first = prefill or decode
            run = Run(request, request.arrival_s, apart=prefill is not None)
            placed[id(run)] = first
            if prefill is not None and request.output_tokens > 1:
                decoders[id(run)] = decode
                apart += 1
            runs.append(run)
            replicas[first.row].submit(run)
            at += 1
        clock[0] = until_s
        # Those that prefill come first: what they have done by now may arrive by now.
        for index, member in enumerate(fleet.members):
            for row, run, arrives_s in links.arrived(until_s) if index == setup.prefill else ():
                twin = Run(run.request, run.arrived_s)
                twins[id(twin)] = run
                replicas[row].join(twin, arrives_s)
                decoders.pop(id(run)).release()
            replica = member.replica
            replica.advance(until_s)
            for run in replica.started:
                if id(run) in decoders:
                    decoders[id(run)].start_pull()
            for run in replica.begun:
                placed.pop(id(run)).release()
                member.tell_prefill(run)
            for run in replica.ended:
                if (back := decoders.get(id(run))) is not None:
                    missing = len(run.request.keys) - replicas[back.row].depth(run.request)
                    near = fleet.are_near(index, back.row)
                    took_s = links.send(back.row, run, missing, near=near)
                    fleet.members[back.row].tell_pull(missing, took_s, near=near)
                    continue
                first_run = twins.pop(id(run), run)
                first_run.done_s, first_run.decoding_s = run.done_s, run.decoding_s
                ended += 1
            replica.started.clear()
            replica.begun.clear()
            replica.ended.clear()
        if ticks % round(_LOAD_S / _TICK_S) == 0:
            fleet.hear_load()
        if ticks % round(_EVENTS_S / _TICK_S) == 0:
            fleet.hear_pages()
            for _ in fleet.directory.sweep():
                pass
    for replica in replicas:
        replica.check_integrity()
    makespan_s = max(run.done_s for run in runs)
    busy = sum(replica.busy_s for replica in replicas) / len(replicas) / makespan_s
    seconds = [run.decoding_s - run.first_s for run in runs if run.apart and run.request.output_tokens > 1]
    gaps = [gap for replica in replicas for gap in replica.gaps] + [(gap_s, 1) for gap_s in seconds]
    return Outcome(runs, gaps, decisions, makespan_s, busy, apart, seconds)
