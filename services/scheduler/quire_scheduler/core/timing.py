"""Timing: how long one request spent in each phase, added up over its preemptions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


class Hop(NamedTuple):
    """The microseconds that a request spent in a phase, and the number of operations in that time; the domain form of
    quire.v1.HopTiming. Operations are waits (queue), calls (lookup), pages (load, pull), computed tokens (prefill) or
    output tokens (decode)."""

    service: str
    phase: str
    us: int
    operations: int


# The service that each phase belongs to; phases are in the order of a request's life.
_SERVICES = {
    "queue": "scheduler",
    "lookup": "kvstore",
    "load": "kvstore",
    "pull": "worker",
    "prefill": "worker",
    "decode": "worker",
}
_NOTHING = (0.0, 0)


@dataclass(slots=True)
class Timing:
    """The times and phases of one request. Times are in seconds of the scheduler's clock. Each run of the request has a
    phase queue, then prefill, then decode."""

    submitted_s: float
    waiting_since_s: float = field(init=False)
    first_start_s: float = 0.0
    first_token_s: float = 0.0
    finished_s: float = 0.0
    preempted_s: tuple[float, ...] = ()
    _run_s: float = 0.0
    _run_token_s: float = 0.0
    _run_output: int = 0
    # Seconds and number of operations, by phase.
    _spent: dict[str, tuple[float, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.waiting_since_s = self.submitted_s

    def looked_up(self, us: int) -> None:
        """Add a lookup in the kvstore."""
        self._add("lookup", us / 1e6, 1)

    def loaded(self, us: int, pages: int) -> None:
        """Add a load of pages from the kvstore."""
        self._add("load", us / 1e6, pages)

    def pulled(self, us: int, pages: int) -> None:
        """Add a pull of pages from another engine."""
        self._add("pull", us / 1e6, pages)

    @property
    def pull_s(self) -> float:
        """The seconds that pages were on their way from another engine."""
        return self._spent.get("pull", _NOTHING)[0]

    @property
    def slot_s(self) -> float:
        """The seconds that the request held slots, until it last left one."""
        return self._spent.get("prefill", _NOTHING)[0] + self._spent.get("decode", _NOTHING)[0]

    def started(self, now: float) -> None:
        """Note that the request took a slot; its wait is added to the phase queue."""
        self._add("queue", now - self.waiting_since_s, 1)
        self.first_start_s = self.first_start_s or now
        self._run_s, self._run_token_s = now, 0.0

    def first_token(self, now: float, computed: int, output: int) -> None:
        """Note the first token since the start of this run. The time since the start is added to prefill, with
        `computed` tokens. The request then has `output` output tokens, from which the tokens of decode are counted."""
        self._add("prefill", now - self._run_s, computed)
        self.first_token_s = self.first_token_s or now
        self._run_token_s, self._run_output = now, output

    def stopped(self, now: float, output: int) -> None:
        """Note that the request lost or left its slot, with `output` tokens in all. The time since the first token of
        this run, and the tokens since, are added to decode. If this run had no token, the time since its start is added
        to prefill; if the request had not started, nothing is. The request waits from now on."""
        if self._run_token_s:
            self._add("decode", now - self._run_token_s, output - self._run_output)
        elif self._run_s:
            self._add("prefill", now - self._run_s, 0)
        self._run_s = self._run_token_s = 0.0
        self.waiting_since_s = now

    def preempted(self, now: float) -> None:
        """Record the time at which the request lost its slot, for lack of pages or after an error that it may
        survive."""
        self.preempted_s = (*self.preempted_s, now)

    def finished(self, now: float) -> None:
        """Note the end of the request. If it never started, all its time is added to the phase queue. A wait after its
        last preemption is in no phase."""
        if not self.first_start_s:
            self._add("queue", now - self.waiting_since_s, 1)
        self.finished_s = now

    def hops(self) -> list[Hop]:
        """Return the phases that took place, in the order of a request's life, each with its microseconds and number of
        operations."""
        found, spent = list[Hop](), self._spent
        for phase, service in _SERVICES.items():
            if phase in spent and spent[phase] != _NOTHING:
                seconds, operations = spent[phase]
                found.append(Hop(service, phase, max(int(seconds * 1e6), 0), operations))
        return found

    def _add(self, phase: str, seconds: float, operations: int) -> None:
        before = self._spent.get(phase, _NOTHING)
        self._spent[phase] = before[0] + seconds, before[1] + operations
