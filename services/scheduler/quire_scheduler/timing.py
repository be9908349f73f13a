"""Where one request's time went, phase by phase, over preemptions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


class Hop(NamedTuple):
    """Microseconds spent in a phase and the operations that they cover; the domain form of quire.v1.HopTiming."""

    service: str
    phase: str
    us: int
    operations: int


@dataclass(slots=True)
class Timing:
    """Stamps are seconds of the scheduler's clock. Phases: queue, then prefill and decode per run of the request."""

    submitted_s: float
    waiting_since_s: float = field(init=False)
    first_start_s: float = 0.0
    first_token_s: float = 0.0
    finished_s: float = 0.0
    _run_s: float = 0.0
    _run_token_s: float = 0.0
    _run_output: int = 0
    _queue: list[float] = field(default_factory=lambda: [0.0, 0])
    _lookup: list[float] = field(default_factory=lambda: [0.0, 0])
    _load: list[float] = field(default_factory=lambda: [0.0, 0])
    _pull: list[float] = field(default_factory=lambda: [0.0, 0])
    _prefill: list[float] = field(default_factory=lambda: [0.0, 0])
    _decode: list[float] = field(default_factory=lambda: [0.0, 0])

    def __post_init__(self) -> None:
        self.waiting_since_s = self.submitted_s

    def looked_up(self, us: int) -> None:
        """A lookup in the kvstore ended."""
        _add(self._lookup, us / 1e6, 1)

    def loaded(self, us: int, pages: int) -> None:
        """Pages came from the kvstore."""
        _add(self._load, us / 1e6, pages)

    def pulled(self, us: int, pages: int) -> None:
        """Pages came from another engine."""
        _add(self._pull, us / 1e6, pages)

    @property
    def pull_s(self) -> float:
        """How long pages were on their way from another engine."""
        return self._pull[0]

    def started(self, now: float) -> None:
        """Took a slot."""
        _add(self._queue, now - self.waiting_since_s, 1)
        self.first_start_s = self.first_start_s or now
        self._run_s, self._run_token_s = now, 0.0

    def first_token(self, now: float, computed: int, output: int) -> None:
        """The first token since the start came, after `computed` tokens of prefill; `output` tokens with it."""
        _add(self._prefill, now - self._run_s, computed)
        self.first_token_s = self.first_token_s or now
        self._run_token_s, self._run_output = now, output

    def stopped(self, now: float, output: int) -> None:
        """Lost or left its slot."""
        if self._run_token_s:
            _add(self._decode, now - self._run_token_s, output - self._run_output)
        elif self._run_s:
            _add(self._prefill, now - self._run_s, 0)
        self._run_s = self._run_token_s = 0.0
        self.waiting_since_s = now

    def finished(self, now: float) -> None:
        """Left for good."""
        if not self.first_start_s:
            _add(self._queue, now - self.waiting_since_s, 1)
        self.finished_s = now

    def hops(self) -> list[Hop]:
        """The phases that took place."""
        phases = (
            ("scheduler", "queue", self._queue),
            ("kvstore", "lookup", self._lookup),
            ("kvstore", "load", self._load),
            ("worker", "pull", self._pull),
            ("worker", "prefill", self._prefill),
            ("worker", "decode", self._decode),
        )
        return [
            Hop(service, phase, max(int(total * 1e6), 0), int(count))
            for service, phase, (total, count) in phases
            if total or count
        ]


def _add(phase: list[float], seconds: float, count: int) -> None:
    phase[0] += seconds
    phase[1] += count
