"""What a choice has been through on its way from engine to engine, since its last token. Plain state, no policy."""

from __future__ import annotations

import time

from quire_router.sequences.poison_detection import PoisonDetector


class MigrationHistory:
    """Made at the first trouble; most choices never have one.

    `wait_left_s` is how much longer it may be without an engine, `until_s` when that ends if it waits now (loop time).
    `poison` knows which of the engines that it lost count against it.
    `shunned` has replicas that refused it, and until when they are not asked again; `busy` those that were full when it
    was new. `times` counts moves, `total_us` the time without an engine before them.
    """

    __slots__ = (
        "avoid",
        "busy",
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

    def progress(self, known_bytes: int, wait_s: float) -> None:
        """Start anew if tokens have come since the last trouble. `known_bytes`: length of the output ids."""
        if known_bytes > self.known_bytes:
            self.known_bytes = known_bytes
            self.poison.clear()
            self.refusals = 0
            self.wait_left_s = wait_s
            self.shunned.clear()

    def began(self) -> None:
        """It has lost its engine."""
        if not self.lost_ns:
            self.lost_ns = time.monotonic_ns()

    def ended(self) -> int:
        """It has another; returns how long it had none, in microseconds."""
        us = (time.monotonic_ns() - self.lost_ns) // 1000 if self.lost_ns else 0
        self.times += bool(self.lost_ns)
        self.total_us += us
        self.lost_ns = 0
        return us
