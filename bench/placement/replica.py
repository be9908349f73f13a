"""SimReplica: a scheduler and its worker in virtual time, with chunked prefill in the batches of decoding rows, and a
page cache with LRU.

A step takes `step_s`, and further time for each row that decodes and for each prompt token. Prompts are computed one
after the other, in the order of arrival, with up to `chunk` tokens per step. When a prompt has its turn, its cached
prefix is looked up. Pages of running sequences are held. Other pages are kept until their room is needed. A request
that is prefilled for another replica ends with its first token. A request that was prefilled elsewhere joins with its
pages, which get names.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bench.placement.trace import TraceRequest


@dataclass(frozen=True)
class Speed:
    """The speed of one replica. The defaults are about those of an 8B model on an H200."""

    step_s: float = 0.004
    row_s: float = 0.0000225
    prefill_tokens_per_s: float = 40_000.0
    chunk: int = 2048
    rows: int = 256
    page: int = 64
    pages: int = 3_000_000 // 64


@dataclass
class Run:
    """A request on its way. Times are of the virtual clock; 0: not yet. `apart`: another replica decodes it."""

    request: TraceRequest
    arrived_s: float
    apart: bool = False
    cached_tokens: int = 0
    left: int = -1
    started_s: float = 0.0
    first_s: float = 0.0
    decoding_s: float = 0.0
    done_s: float = 0.0
    ready_s: float = 0.0
    held: int = 0
    row: int = -1


class SimReplica:
    """`stored` and `removed` are page keys since they were last taken. `started` are requests whose prompt has been
    computed since then, and `begun` those that have their first token. `prefilled_tokens` and `busy_s` only grow."""

    def __init__(self, speed: Speed) -> None:
        self.speed = speed
        self.now_s = 0.0
        self.waiting: deque[Run] = deque()
        self.started: list[Run] = []
        self.begun: list[Run] = []
        self.ended: list[Run] = []
        self.stored: list[int] = []
        self.removed: list[int] = []
        self.gaps: list[tuple[float, int]] = []
        self.busy_s = 0.0
        self.prefilled_tokens = 0
        self.waiting_tokens = 0
        self._prefilling: Run | None = None
        self._joining: deque[Run] = deque()
        self._steps = 0
        self._order = 0
        self._decoding: list[tuple[int, int, Run]] = []
        self._free = speed.pages
        # Page keys: how many runs hold each, and those that nobody holds, least recently used first.
        self._held: dict[int, int] = {}
        self._idle: dict[int, None] = {}

    def has(self, key: int) -> bool:
        """Whether it holds a page."""
        return key in self._held or key in self._idle

    @property
    def running(self) -> int:
        """Return the sequences that have begun."""
        return len(self._decoding) + (self._prefilling is not None)

    def submit(self, run: Run) -> None:
        """Add a request to compute."""
        run.ready_s = run.arrived_s
        self.waiting.append(run)
        self.waiting_tokens += run.request.input_tokens

    def join(self, run: Run, at_s: float) -> None:
        """Add a request whose pages have arrived from elsewhere at a given time. It decodes when a row is free."""
        run.ready_s = at_s
        self._joining.append(run)

    @property
    def queued(self) -> int:
        """Return the number of waiting sequences."""
        return len(self.waiting) + len(self._joining)

    def advance(self, until_s: float) -> None:
        """Run until the clock has reached this time, or one step beyond."""
        speed = self.speed
        while self.now_s < until_s:
            self._admit()
            rows, run = len(self._decoding), self._prefilling
            coming_s = min(until_s, self._next_s())
            if run is None and not rows:
                self.now_s = coming_s
                continue
            step_s = speed.step_s + rows * speed.row_s
            if run is None:
                most = -(-(coming_s - self.now_s) // step_s)
                steps = int(max(1, min(self._decoding[0][0] - self._steps, most)))
            else:
                steps, chunk = 1, min(speed.chunk, run.left)
                step_s += chunk / speed.prefill_tokens_per_s
                run.left -= chunk
                self.waiting_tokens -= chunk
                self.prefilled_tokens += chunk
            self.now_s += steps * step_s
            self.busy_s += steps * step_s
            self._steps += steps
            if rows:
                self.gaps.append((step_s, rows * steps))
            if run is not None and run.left <= 0:
                self._computed(run)
            while self._decoding and self._decoding[0][0] <= self._steps:
                self._finish(heapq.heappop(self._decoding)[2])

    def _next_s(self) -> float:
        """Return the arrival time of the next request that has not arrived yet, among the heads of the queues."""
        heads = [queue[0].ready_s for queue in (self.waiting, self._joining) if queue]
        return min((ready_s for ready_s in heads if ready_s > self.now_s), default=float("inf"))

    def _admit(self) -> None:
        while self._joining and self._joining[0].ready_s <= self.now_s and len(self._decoding) < self.speed.rows:
            run = self._joining[0]
            hits = self._hits(run, len(run.request.keys))
            if not self._take(run, hits):
                break
            self._joining.popleft()
            run.cached_tokens, run.left = len(hits) * self.speed.page, 0
            self._name(run)
            self._decode(run)
        if self._prefilling is not None or not self.waiting or self.running >= self.speed.rows:
            return
        run = self.waiting[0]
        if run.ready_s > self.now_s:
            return
        hits = self._hits(run, (run.request.input_tokens - 1) // self.speed.page)
        if not self._take(run, hits):
            return
        self.waiting.popleft()
        run.started_s = self.now_s
        self.started.append(run)
        run.cached_tokens = len(hits) * self.speed.page
        run.left = run.request.input_tokens - run.cached_tokens
        self.waiting_tokens -= run.cached_tokens
        self._prefilling = run

    def depth(self, request: TraceRequest) -> int:
        """Return the number of leading pages of a prompt that it holds."""
        return len(self._hits(Run(request, 0.0), len(request.keys)))

    def _hits(self, run: Run, most: int) -> list[int]:
        hits = []
        for key in run.request.keys[:most].tolist():
            if not self.has(key):
                break
            hits.append(key)
        return hits

    def _take(self, run: Run, hits: list[int]) -> bool:
        """Give a request its pages, some of which it may have already. Returns False if there is no room."""
        needed = self._pages_for(run) - len(hits)
        if self._free + len(self._idle) - sum(key in self._idle for key in hits) < needed:
            return False
        for key in hits:
            self._hold(key)
        self._make_room(needed)
        run.held = needed
        self._free -= needed
        return True

    def _pages_for(self, run: Run) -> int:
        output = 1 if run.apart else run.request.output_tokens
        return -(-(run.request.input_tokens + output) // self.speed.page)

    def _make_room(self, needed: int) -> bool:
        """Evict pages that no sequence holds, least recently used first."""
        if self._free + len(self._idle) < needed:
            return False
        while self._free < needed:
            key = next(iter(self._idle))
            del self._idle[key]
            self.removed.append(key)
            self._free += 1
        return True

    def _hold(self, key: int) -> None:
        if key in self._idle:
            del self._idle[key]
            self._held[key] = 1
        else:
            self._held[key] += 1

    def _computed(self, run: Run) -> None:
        """Note that all pages of the prompt are computed: they get names, and the request gets its first token."""
        self._prefilling = None
        run.first_s = self.now_s
        self.begun.append(run)
        self._name(run)
        if run.apart or run.request.output_tokens <= 1:
            self._finish(run)
        else:
            self._decode(run)

    def _name(self, run: Run) -> None:
        hits = run.cached_tokens // self.speed.page
        for key in run.request.keys.tolist()[hits:]:
            if self.has(key):
                self._hold(key)
            else:
                # The page is the cache's from now on, no longer the run's own.
                self._held[key] = 1
                self.stored.append(key)
                run.held -= 1

    def _decode(self, run: Run) -> None:
        run.decoding_s = self.now_s
        self._order += 1
        heapq.heappush(self._decoding, (self._steps + run.request.output_tokens - 1, self._order, run))

    def _finish(self, run: Run) -> None:
        run.done_s = self.now_s
        self.ended.append(run)
        self._free += run.held
        if run.left == 0:
            # Last pages first, so that they are evicted first.
            for key in reversed(run.request.keys.tolist()):
                self._held[key] -= 1
                if not self._held[key]:
                    del self._held[key]
                    self._idle[key] = None
        run.left = -1

    def check_integrity(self) -> None:
        """Check that every page is free or kept; for an idle replica. Raises AssertionError."""
        assert not self.running and not self.queued and not self._held
        assert self._free + len(self._idle) == self.speed.pages and self.waiting_tokens == 0
