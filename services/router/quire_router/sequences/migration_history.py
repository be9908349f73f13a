"""What a sequence has been through on its way from engine to engine, since its last token. Decides nothing."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from quire_router.sequences.poison_detection import PoisonDetector

if TYPE_CHECKING:
    from collections.abc import Mapping

_FIRST_SHUN_S, _MAX_SHUN_S = 0.05, 1.0


class MigrationHistory:
    """Made at the first trouble; most sequences never have one. Times `*_s` are those of the event loop.

    `wait_left_s` is how much longer it may be without an engine, `until_s` when that ends if it waits now.
    `poison` knows which of the engines that it lost count against it.
    `shunned` has replicas that refused it, and until when they are not asked again; `busy` those that were full when it
    was new. `times` counts migrations, `total_us` the time without an engine before them. `events` has each for the
    trace, if there is one: the time in Unix nanoseconds, and attributes.
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
        """Forget former failures if tokens have come since. `known_bytes`: length of the output ids; `wait_s`: how long
        it may be without an engine from now on."""
        if known_bytes > self.known_bytes:
            self.known_bytes = known_bytes
            self.poison.clear()
            self.refusals = 0
            self.wait_left_s = wait_s
            self.shunned.clear()

    def leave_engine(self, instance: str) -> None:
        """Avoid this engine for the next attempts if another one can run the sequence."""
        self.avoid = instance

    def lose_engine(self, reason: str) -> None:
        """Record that the sequence has lost its engine. `reason`: a metric's label."""
        self.reason = reason
        if not self.lost_ns:
            self.lost_ns = time.monotonic_ns()

    def find_engine(self) -> int:
        """Record that the sequence has another engine; return how long it had none, in microseconds."""
        us = (time.monotonic_ns() - self.lost_ns) // 1000 if self.lost_ns else 0
        self.times += bool(self.lost_ns)
        self.total_us += us
        self.lost_ns = 0
        return us

    def add_event(self, when_ns: int, attributes: Mapping[str, str | int]) -> None:
        """Keep a migration for the trace."""
        self.events.append((when_ns, attributes))

    def shun(self, instance: str, now_s: float) -> None:
        """Do not ask this replica, which refused the sequence, for a while. Each refusal doubles that time."""
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
        """Return when to try again: when a replica may be asked again, or when the wait is over."""
        return min([self.until_s, *(due_s for due_s in self.shunned.values() if due_s > now_s)])
