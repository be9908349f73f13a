"""What it costs to bring a preempted request's pages back: to compute them again, or to store them and load them.

Everything is measured: tokens per second of prefill, bytes per second of stores and loads, the time of a lookup. What
was not measured yet is not counted on: then pages are computed again. Knows nothing of which pages are where.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire_common.credit import MoveKind

if TYPE_CHECKING:
    from quire_common.credit import Report
    from quire_scheduler.kv.page_moves import Carried

# Of what was measured before, as much counts with each new measurement.
_KEEP = 0.9
# A step that prefills beside decoders is counted with this share of its time at least.
_LEAST_SHARE = 0.1
# One measurement may be this many times slower than expected; what is above that is a pause of the process or the host.
_MAX_SURPRISE = 4.0


class Rate:
    """Amounts per second, over the last ten measurements or so. A measurement far above the others counts as a slow
    one, so a pause misleads little and a rate that has really changed is learnt within a few measurements."""

    def __init__(self) -> None:
        self._amount = 0.0
        self._seconds = 0.0

    def add(self, amount: float, seconds: float) -> None:
        """Add a measurement: `amount` took `seconds`, which are cut where they exceed the expected time far."""
        expected_s = self.seconds(amount)
        if expected_s:
            seconds = min(seconds, _MAX_SURPRISE * expected_s)
        self._amount = self._amount * _KEEP + amount
        self._seconds = self._seconds * _KEEP + seconds

    def seconds(self, amount: float) -> float | None:
        """How long so much would take; None where nobody knows."""
        return amount * self._seconds / self._amount if self._amount and self._seconds else None

    def per_s(self) -> float:
        """How much in a second; 0.0 where nobody knows."""
        return self._amount / self._seconds if self._seconds else 0.0


class Lane:
    """Moves of one kind are carried one after the other: a batch of them took no longer than since the last ended."""

    def __init__(self) -> None:
        self.rate = Rate()
        self._last_s = 0.0

    def ended(self, amount: int, longest_us: int, now: float) -> None:
        """Add a batch of moves that were reported together. It took as long as its longest move, but no longer than
        since the last batch."""
        seconds = longest_us / 1e6
        if self._last_s:
            seconds = min(seconds, now - self._last_s)
        self._last_s = now
        if seconds > 0:
            self.rate.add(amount, seconds)


class ResumeCost:
    """Of one worker. `page_bytes`: of all KV groups together."""

    def __init__(self, page_size: int, page_bytes: int) -> None:
        self._page_size = page_size
        self._page_bytes = page_bytes
        self._prefill = Rate()
        self._decode_us = 0.0
        self._lanes = {MoveKind.STORE: Lane(), MoveKind.LOAD: Lane()}
        self._lookup = Rate()

    def steps(self, report: Report) -> None:
        """Learn the speed of prefill from steps that were reported with their times. What decoding alone takes is
        subtracted from steps that do both."""
        if len(report.timing) != report.steps:
            return
        columns = (report.timing, report.step_prefill_tokens.tolist(), report.step_rows.tolist())
        for timing, tokens, rows in zip(*columns, strict=True):
            us = float(timing.prepare + timing.forward + timing.sample + timing.copy)
            if not tokens:
                self._decode_us = us if not self._decode_us else self._decode_us * _KEEP + us * (1 - _KEEP)
            elif us > 0:
                # A prompt's end is a row too; with more rows, most are of decoders.
                beside = self._decode_us if rows > 1 else 0.0
                self._prefill.add(tokens, max(us - beside, _LEAST_SHARE * us) / 1e6)

    def moved(self, carried: Carried, now: float) -> None:
        """Moves have ended. Those of other kinds than these cost nothing."""
        if lane := self._lanes.get(carried.kind):
            lane.ended(carried.amount, carried.longest_us, now)

    def looked_up(self, us: int) -> None:
        """The kvstore answered."""
        self._lookup.add(1, us / 1e6)

    def prefill_s(self, tokens: float) -> float:
        """How long it takes to compute so many tokens of prompts; 0.0 before anything was computed."""
        return self._prefill.seconds(tokens) or 0.0

    def compute_s(self, pages: int) -> float | None:
        """How long it takes to compute so many pages of a prompt; None before anything was computed."""
        return self._prefill.seconds(pages * self._page_size)

    def swap_pays(self, pages: int, unstored: int) -> bool:
        """Whether storing `unstored` pages and loading all `pages` is quicker than computing them; False where that was
        not measured yet."""
        computing = self.compute_s(pages)
        storing = self._lanes[MoveKind.STORE].rate.seconds(unstored * self._page_bytes)
        loading = self._lanes[MoveKind.LOAD].rate.seconds(pages * self._page_bytes)
        if loading is None:
            # Until something was loaded: as fast as it was stored.
            loading = self._lanes[MoveKind.STORE].rate.seconds(pages * self._page_bytes)
        if computing is None or loading is None or (unstored and storing is None):
            return False
        return (storing or 0.0) + loading + (self._lookup.seconds(1) or 0.0) < computing
