"""SoakRun: requests that arrive at random at one replica, and of which some are aborted, in every state.

Looked at on the way and at the end: the books of scheduler and engine, pages that nobody has (NaN, so that whoever
reads one fails), and that all pages and slots come back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from bench.harness.local_engine import SESSION, LocalEngine
from quire_common.finish import FinishReason
from quire_common.sequence import Sequence
from quire_scheduler.core.request import Request, State
from quire_worker.engine.slots import SlotState

QUEUED, PREFILLING, DECODING = "queued", "prefilling", "decoding"
STATES = (QUEUED, PREFILLING, DECODING)


@dataclass(frozen=True, slots=True)
class SoakPlan:
    """Steps and requests that a soak has at the least, and what must have come about by its end."""

    steps: int
    requests: int
    arrivals: tuple[float, float]
    """Requests that come in a step, on the average: in calm times, and in a rush."""
    abort_rate: float
    """Of rounds in which some request is aborted."""
    least_finished: int
    least_aborted: int
    """In each state."""
    least_preempted: int = 0
    least_cached: int = 0
    """Prompt tokens that were found in the device's pages."""
    check_every: int = 50
    """Steps."""
    rush_every: int = 400
    """Steps; a quarter of them is the rush."""
    most_open: int = 200
    """Requests that have not ended; no more come meanwhile."""


@dataclass(slots=True)
class SoakTally:
    """What came about."""

    requests: int = 0
    aborted: Counter[str] = field(default_factory=Counter)
    finished: Counter[str] = field(default_factory=Counter)
    checks: int = 0
    poisoned: int = 0
    errors: Counter[str] = field(default_factory=Counter)


class SoakRun:
    """`poison` makes pages hold NaN, at a time at which no step touches them."""

    def __init__(
        self, local: LocalEngine, requests: Iterator[Sequence], plan: SoakPlan, poison: Callable[[list[int]], None]
    ) -> None:
        self._local = local
        self._requests = requests
        self._plan = plan
        self._poison = poison
        self._rng = np.random.default_rng(1)
        self.tally = SoakTally()
        self.sequences: dict[int, Sequence] = {}
        self._open: set[int] = set()

    def run(self) -> None:
        """All of it. Raises what a check of the books raises, and RuntimeError where something does not come back."""
        local, plan, engine = self._local, self._plan, self._local.engine
        last, checked = 0, 0
        while engine.steps < plan.steps or self.tally.requests < plan.requests:
            rush = engine.steps % plan.rush_every < plan.rush_every // 4
            due = plan.arrivals[rush] * max(1, engine.steps - last)
            last = engine.steps
            for _ in range(int(self._rng.poisson(due))):
                if len(self._open) < plan.most_open:
                    self._submit()
            if not self._open:
                self._submit()
            if self._rng.random() < plan.abort_rate:
                self._abort()
            local.step()
            self._forget_ended()
            if engine.steps // plan.check_every > checked:
                checked = engine.steps // plan.check_every
                self._check()
        local.run()
        self._forget_ended()
        local.check_quiet()
        self._check_all_is_back()

    def shortfalls(self) -> list[str]:
        """What did not come about often enough."""
        plan, tally = self._plan, self.tally
        finished = tally.finished[FinishReason.STOP.name] + tally.finished[FinishReason.LENGTH.name]
        told = [] if finished >= plan.least_finished else [f"{finished} requests finished of {plan.least_finished}"]
        told += [
            f"{tally.aborted[state]} aborted while {state}, of {plan.least_aborted}"
            for state in STATES
            if tally.aborted[state] < plan.least_aborted
        ]
        stats = self._local.scheduler.stats
        if stats.preemptions < plan.least_preempted:
            told.append(f"{stats.preemptions} preempted of {plan.least_preempted}")
        if stats.cached_tokens < plan.least_cached:
            told.append(f"{stats.cached_tokens} prompt tokens found in pages, of {plan.least_cached}")
        if tally.finished[FinishReason.ABORT.name] != tally.aborted.total():
            told.append(f"{tally.aborted.total()} aborts, {tally.finished[FinishReason.ABORT.name]} told of")
        if tally.requests != tally.finished.total():
            told.append(f"{tally.requests} requests, {tally.finished.total()} ended")
        return told

    def _submit(self) -> None:
        handle = self.tally.requests
        self.tally.requests += 1
        self.sequences[handle] = next(self._requests)
        self._open.add(handle)
        self._local.submit(handle, self.sequences[handle])

    def _abort(self) -> None:
        """Somebody in the state in which the fewest were aborted, if there is somebody in it."""
        by_state: dict[str, list[int]] = {state: [] for state in STATES}
        for handle in sorted(self._open):
            if (request := self._local.scheduler._replica.requests.get((SESSION, handle))) is not None:
                by_state[self._state(request)].append(handle)
        for state in sorted(STATES, key=lambda state: self.tally.aborted[state]):
            if by_state[state]:
                handle = by_state[state][int(self._rng.integers(0, len(by_state[state])))]
                self._local.abort(handle)
                self.tally.aborted[state] += 1
                return

    def _state(self, request: Request) -> str:
        if request.state != State.STARTED:
            return QUEUED
        return DECODING if self._local.served[request.handle].tokens else PREFILLING

    def _forget_ended(self) -> None:
        for handle in [handle for handle in self._open if self._local.served[handle].finish]:
            served = self._local.served[handle]
            self._open.remove(handle)
            self.tally.finished[served.finish.name] += 1
            if served.error:
                self.tally.errors[served.error] += 1

    def _check(self) -> None:
        self.tally.checks += 1
        self._local.engine.check_integrity()
        self._local.scheduler.check_integrity()
        (pool,) = self._local.scheduler._replica.pools.pools
        spare = list(pool._free)
        self.tally.poisoned += len(spare)
        self._poison(spare)

    def _check_all_is_back(self) -> None:
        load, residents = self._local.scheduler.load(), self._local.engine.residents
        if load.free_pages != load.pages:
            raise RuntimeError(f"{load.pages - load.free_pages} pages have not come back")
        if (residents.table.state != SlotState.IDLE).any() or residents.states.refs.any():
            raise RuntimeError("slots or pages of the engine have not come back")
