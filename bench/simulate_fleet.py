"""The router's placement over simulated replicas, in virtual time: the real table, directory, policies and bookkeeping.

What a router hears comes as late as it does in the field: load every 200 ms, page events every 100 ms, first tokens at
once. With separate pools a request is placed twice: where it is computed, and where it decodes once its pages are
there; its first token is the prefill side's.
"""

from __future__ import annotations

import heapq
import itertools
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from bench.simulate_replica import Run, SimReplica, Speed
from quire_common.credit.hello import KvGroup, ModelInfo, PageGeometry
from quire_common.sequence import Sequence, Stop
from quire_router.engine.load import Load
from quire_router.pages.page_directory import PageDirectory
from quire_router.placement.placer import Placer
from quire_router.placement.prefix_view import PrefixView
from quire_router.placement.registry import PAGE_AWARE, Weights, policies
from quire_router.placement.replica_table import ReplicaTable
from quire_router.placement.wish import Wish

if TYPE_CHECKING:
    from collections.abc import Sequence as Sequence_

    from numpy.typing import NDArray

    from bench.simulate_trace import TraceRequest
    from quire_router.pages.page_table import Keys
    from quire_router.placement.replica_table import PagePool, Placed, ReplicaRow

_TICK_S, _LOAD_S, _EVENTS_S = 0.02, 0.2, 0.1
_NO_TOKENS: NDArray[np.int32] = np.empty(0, np.int32)


@dataclass(frozen=True)
class Setup:
    """`prefill` and `decode` replicas; both 0: all `replicas` do both. `bandwidth`: bytes a second between workers."""

    policy: str = "kv_aware"
    replicas: int = 16
    prefill: int = 0
    decode: int = 0
    speed: Speed = field(default_factory=Speed)
    bandwidth: float = 25e9
    token_bytes: int = 131_072
    weights: Weights = field(default_factory=Weights)


@dataclass
class Outcome:
    """What became of the requests, in the order of arrival, and what decisions took (seconds of CPU)."""

    runs: list[Run]
    gaps: list[tuple[float, int]]
    decisions_s: list[float]
    makespan_s: float
    busy: float


class _KnownWish(Wish):
    """Its pages have names already: hashing is measured elsewhere (bench.index)."""

    __slots__ = ("keys", "known")

    def __init__(self, request: TraceRequest) -> None:
        super().__init__(Sequence(_NO_TOKENS, Stop(1)))
        self.known, self.keys = request.input_tokens, request.keys

    @property
    def tokens(self) -> int:
        return self.known

    def chains(self, pool: PagePool) -> Sequence_[Keys]:
        return [self.keys]


class _Pool:
    """Replicas of one role, and a placer for them."""

    def __init__(self, setup: Setup, count: int, policy: str, pages: int, clock: list[float], *, decodes: bool) -> None:
        self.table = ReplicaTable()
        self.directory = PageDirectory(pages, 10.0)
        view = PrefixView(self.table, self.directory, lambda: clock[0])
        named = policies(policy, self.table, view, setup.weights)
        self.placer = Placer(self.table, named, view if policy in PAGE_AWARE else None)
        self.listens = policy in PAGE_AWARE
        group = KvGroup("full", 1, "layout", "bf16", 1, 1, 1)
        model = ModelInfo("m", "A", 1 << 20, 1 << 17, (), b"d", PageGeometry(setup.speed.page, (group,), b"n" * 32))
        self.replicas = [SimReplica(setup.speed, decodes=decodes) for _ in range(count)]
        self.rows: list[ReplicaRow] = []
        for index in range(count):
            row = self.table.add(f"replica-{index}")
            row.show(accepts=True, model=model)
            row.held_as(self.directory.open())
            self.rows.append(row)
        self.hear_load()

    def place(self, request: TraceRequest) -> Placed:
        return self.placer.place(_KnownWish(request), self.table.able("m", None, 0))

    def hear_load(self) -> None:
        for replica, row in zip(self.replicas, self.rows, strict=True):
            row.loaded(
                Load(
                    "ready",
                    running=replica.running,
                    waiting=replica.queued,
                    max_num_seqs=replica.speed.rows,
                    waiting_prefill_tokens=replica.waiting_tokens,
                )
            )

    def hear_pages(self) -> None:
        for replica, row in zip(self.replicas, self.rows, strict=True):
            if self.listens:
                holder = int(self.table.holder[row.row])
                # Of a page that came and went since the last frame, the last word counts.
                stored = [key for key in replica.stored if replica.has(key)]
                gone = [key for key in replica.removed if not replica.has(key)]
                if stored:
                    self.directory.add(holder, np.array(stored, np.uint64))
                if gone:
                    self.directory.remove(holder, np.array(gone, np.uint64))
            replica.stored.clear()
            replica.removed.clear()


def simulate(requests: Sequence_[TraceRequest], setup: Setup) -> Outcome:
    """Replay the requests until the last has ended."""
    clock = [0.0]
    split = setup.prefill > 0
    count = setup.prefill if split else setup.replicas
    pages = setup.speed.pages * count
    front = _Pool(setup, count, setup.policy, pages, clock, decodes=not split)
    back = _Pool(setup, setup.decode, "least_loaded", 1, clock, decodes=True) if split else None
    pools = [front, back] if back is not None else [front]
    placed: dict[int, Placed] = {}
    runs: list[Run] = []
    decisions: list[float] = []
    moving: list[tuple[float, int, Run]] = []
    twins: dict[int, Run] = {}
    order = itertools.count()
    ended, at = 0, 0
    ticks = 0
    while ended < len(requests):
        ticks += 1
        until_s = ticks * _TICK_S
        while at < len(requests) and requests[at].arrival_s <= until_s:
            request = requests[at]
            clock[0] = request.arrival_s
            started = time.thread_time()
            one = front.place(request)
            decisions.append(time.thread_time() - started)
            run = Run(request, request.arrival_s, row=one.row)
            placed[id(run)] = one
            runs.append(run)
            front.replicas[one.row].submit(run)
            at += 1
        clock[0] = until_s
        while back is not None and moving and moving[0][0] <= until_s:
            arrives_s, _, run = heapq.heappop(moving)
            twin = Run(run.request, run.arrived_s)
            twins[id(twin)] = run
            back.replicas[back.place(run.request).row].join(twin, arrives_s)
        for pool in pools:
            for replica in pool.replicas:
                replica.advance(until_s)
                for run in replica.begun:
                    placed.pop(id(run)).began()
                for run in replica.ended:
                    if pool is front and back is not None and run.request.output_tokens > 1:
                        transfer_s = run.request.input_tokens * setup.token_bytes / setup.bandwidth
                        heapq.heappush(moving, (run.done_s + transfer_s, next(order), run))
                        continue
                    twins.pop(id(run), run).done_s = run.done_s
                    ended += 1
                replica.begun.clear()
                replica.ended.clear()
        if ticks % round(_LOAD_S / _TICK_S) == 0:
            for pool in pools:
                pool.hear_load()
        if ticks % round(_EVENTS_S / _TICK_S) == 0:
            for pool in pools:
                pool.hear_pages()
                for _ in pool.directory.sweep():
                    pass
    replicas = [replica for pool in pools for replica in pool.replicas]
    for replica in replicas:
        replica.check_integrity()
    makespan_s = max(run.done_s for run in runs)
    busy = sum(replica.busy_s for replica in replicas) / len(replicas) / makespan_s
    return Outcome(runs, [gap for replica in replicas for gap in replica.gaps], decisions, makespan_s, busy)
