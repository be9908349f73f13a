"""Records the engines that a sequence has lost, the refusals, and its waits for an engine. Decides nothing."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from quire_router.sequences.poison_detection import PoisonDetector

if TYPE_CHECKING:
    from collections.abc import Mapping

_FIRST_SHUN_S, _MAX_SHUN_S = 0.05, 1.0


class MigrationHistory:
    """The migrations of one sequence. The history is made at the first failure or wait, so most sequences never have
    one. Times `*_s` are times of the event loop's clock.

    `wait_left_s` is the time for which the sequence may still be without an engine; if it waits now, that time ends at
    `until_s`. `poison` counts the engines that the sequence has lost. `shunned` has the replicas that refused the
    sequence, and the time until which each of them is not asked again. `busy` has the replicas that were full when the
    sequence was new. `times` is the number of migrations, and `total_us` the time without an engine before them.
    `events` has the migrations for the trace, with Unix nanoseconds and attributes.
    """

    __slots__ = (
        "avoid",
        "busy",
        "events",
        "known_bytes",
        "lost_ns",
        "poison",
        "reason",
        "refusals",
        "shunned",
        "times",
        "total_us",
        "until_s",
        "wait_left_s",
    )

    def __init__(self, wait_s: float, known_bytes: int) -> None:
        self.wait_left_s = wait_s
        self.until_s = 0.0
        self.known_bytes = known_bytes
        self.poison = PoisonDetector()
        self.refusals = 0
        self.avoid = ""
        self.reason = ""
        self.shunned: dict[str, float] = {}
        self.busy: set[str] = set()
        self.lost_ns = 0
        self.times = 0
        self.total_us = 0
        self.events: list[tuple[int, Mapping[str, str | int]]] = []

    def note_progress(self, known_bytes: int, wait_s: float) -> None:
        """If tokens have come since the last failure, forget earlier failures and refusals, and set the time for which
        the sequence may be without an engine to `wait_s`. `known_bytes` is the present length of the output ids in
        bytes."""
        if known_bytes > self.known_bytes:
            self.known_bytes = known_bytes
            self.poison.clear()
            self.refusals = 0
            self.wait_left_s = wait_s
            self.shunned.clear()

    def leave_engine(self, instance: str) -> None:
        """Avoid this engine in the next attempts, if another engine can run the sequence."""
        self.avoid = instance

    def lose_engine(self, reason: str) -> None:
        """Record why the sequence has lost its engine, and when, unless it has been without one since an earlier loss.
        `reason`: a metric's label."""
        self.reason = reason
        if not self.lost_ns:
            self.lost_ns = time.monotonic_ns()

    def find_engine(self) -> int:
        """Record that the sequence has another engine; this counts as a migration if it had lost one. Returns the
        microseconds for which it had no engine."""
        us = (time.monotonic_ns() - self.lost_ns) // 1000 if self.lost_ns else 0
        self.times += bool(self.lost_ns)
        self.total_us += us
        self.lost_ns = 0
        return us

    def add_event(self, when_ns: int, attributes: Mapping[str, str | int]) -> None:
        """Keep a migration for the trace."""
        self.events.append((when_ns, attributes))

    def shun(self, instance: str, now_s: float) -> None:
        """Do not ask this replica for a while, because it refused the sequence. The first time is 0.1 s; each further
        refusal, by any replica, doubles it, up to a second."""
        self.refusals += 1
        self.shunned[instance] = now_s + min(_MAX_SHUN_S, _FIRST_SHUN_S * 2 ** min(self.refusals, 8))

    def shunned_at(self, now_s: float) -> list[str]:
        """Return the replicas that are not to be asked now."""
        return [instance for instance, until_s in self.shunned.items() if until_s > now_s]

    def begin_wait(self, now_s: float) -> None:
        """Note that the sequence waits for an engine from now on."""
        self.until_s = now_s + self.wait_left_s

    def count_wait(self, now_s: float) -> None:
        """Subtract the time that the sequence has waited until now."""
        self.wait_left_s = self.until_s - now_s

    def next_due_s(self, now_s: float) -> float:
        """Return the time of the next try: the earliest time at which a replica may be asked again, or the end of the
        wait."""
        return min([self.until_s, *(due_s for due_s in self.shunned.values() if due_s > now_s)])
