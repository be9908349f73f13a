"""Credit with a fixed lead, many Grants in flight, spares: what free-running will do, as crudely as possible.

It shows that the policy is the only thing to replace: attribution, fences and late tokens work under it already.
"""

from __future__ import annotations

from typing import Any

from quire_common.credit import Budget, Report, WorkerHello


class EagerPolicy:
    def __init__(self, hello: WorkerHello, *, lead: int = 6, in_flight: int = 4, budget: Budget | None = None) -> None:
        self._hello = hello
        self._lead = lead
        self._in_flight = in_flight
        self._budget = budget or Budget(64, 64, 16, 2)
        self._seq = 0
        self._retired = 0

    def may_grant(self) -> bool:
        return self._seq - self._retired < self._in_flight

    def target(self, known_len: Any) -> Any:
        return known_len + self._lead

    def most_started(self) -> int:
        return self._hello.num_slots

    def worth_a_step(self) -> bool:
        return False

    def budget(self) -> Budget:
        return self._budget

    def granted(self, seq: int) -> None:
        self._seq = seq

    def reported(self, report: Report) -> None:
        self._retired = max(self._retired, report.retired)
