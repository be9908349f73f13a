"""ResumeCost: the time to bring back a preempted request's pages, either by computing them again, or by storing and
loading them.

All figures are measured: prefill in tokens per second, stores and loads in bytes per second, and the time of a lookup.
While a figure that is needed has not been measured, pages are computed again; `swap_pays` says which may be missing.
This module does not know which pages are where.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire_common.credit import MoveKind

if TYPE_CHECKING:
    from quire_common.credit import Report
    from quire_scheduler.kv.page_moves import Carried

# The weight of all earlier measurements when a new one comes.
_KEEP = 0.9
# At least this share of a step's time is counted as prefill, if the step prefills beside decoders.
_LEAST_SHARE = 0.1
# A measurement is cut to this many times the expected time; the rest is taken for a pause of the process or the host.
_MAX_SURPRISE = 4.0


class Rate:
    """Amounts per second, over the last ten measurements or so. A time far above the expected one is cut, so that a
    pause misleads little; a rate that has really changed is still learnt within a few measurements."""

    def __init__(self) -> None:
        self._amount = 0.0
        self._seconds = 0.0

    def add(self, amount: float, seconds: float) -> None:
        """Add a measurement: `amount`, more than 0, took `seconds`. Earlier measurements keep 0.9 of their weight. A
        time of more than 4 times the expected one is cut to that."""
        expected_s = self.seconds(amount)
        if expected_s:
            seconds = min(seconds, _MAX_SURPRISE * expected_s)
        self._amount = self._amount * _KEEP + amount
        self._seconds = self._seconds * _KEEP + seconds

    def seconds(self, amount: float) -> float | None:
        """Return the seconds that `amount` would take; None before the first measurement."""
        return amount * self._seconds / self._amount if self._amount and self._seconds else None

    def per_s(self) -> float:
        """Return the amount per second; 0.0 before the first measurement."""
        return self._amount / self._seconds if self._seconds else 0.0


class Lane:
    """Measures the rate of moves of one kind, which the worker carries out one after the other. A batch of them
    therefore took no longer than the time since the last batch ended."""

    def __init__(self) -> None:
        self.rate = Rate()
        self._last_s = 0.0

    def add_ended_batch(self, amount: int, longest_us: int, now: float) -> None:
        """Add a batch of moves that one Report told of. Its time is that of its longest move, but at most the time
        since the last batch. A batch that moved nothing or took no time does not count for the rate, but the time of
        the next one is measured from it."""
        seconds = longest_us / 1e6
        if self._last_s:
            seconds = min(seconds, now - self._last_s)
        self._last_s = now
        if amount and seconds > 0:
            self.rate.add(amount, seconds)


class ResumeCost:
    """The measured costs of one worker. `page_bytes` is the size of a page in all KV groups together."""

    def __init__(self, page_size: int, page_bytes: int) -> None:
        self._page_size = page_size
        self._page_bytes = page_bytes
        self._prefill = Rate()
        self._decode_us = 0.0
        self._lanes = {MoveKind.STORE: Lane(), MoveKind.LOAD: Lane()}
        self._lookup = Rate()

    def measure_steps(self, report: Report) -> None:
        """Measure the speed of prefill by the steps of a Report; a Report without the times of its steps is ignored.
        Steps without prefill measure the time of decoding, which is subtracted from steps that prefill and have more
        than one row; at least a tenth of their time counts as prefill."""
        step_rows = report.step_rows.tolist()
        if len(report.timing) != len(step_rows):
            return
        columns = (report.timing, report.step_prefill_tokens.tolist(), step_rows)
        for timing, tokens, rows in zip(*columns, strict=True):
            us = float(timing.prepare + timing.forward + timing.sample + timing.copy)
            if not tokens:
                self._decode_us = us if not self._decode_us else self._decode_us * _KEEP + us * (1 - _KEEP)
            elif us > 0:
                # A row may also be the end of a prompt; if there are more rows, most belong to decoders.
                beside = self._decode_us if rows > 1 else 0.0
                self._prefill.add(tokens, max(us - beside, _LEAST_SHARE * us) / 1e6)

    def moved(self, carried: Carried, now: float) -> None:
        """Measure stores and loads by the moves that have ended; other kinds are ignored."""
        if lane := self._lanes.get(carried.kind):
            lane.add_ended_batch(carried.amount, carried.longest_us, now)

    def looked_up(self, us: int) -> None:
        """Add the time of a lookup that the kvstore answered."""
        self._lookup.add(1, us / 1e6)

    def prefill_s(self, tokens: float) -> float:
        """Return the seconds that computing `tokens` prompt tokens takes; 0.0 before anything was computed."""
        return self._prefill.seconds(tokens) or 0.0

    def compute_s(self, pages: int) -> float | None:
        """Return the seconds that computing `pages` pages of a prompt takes; None before anything was computed."""
        return self._prefill.seconds(pages * self._page_size)

    def swap_pays(self, pages: int, unstored: int) -> bool:
        """Whether a lookup, storing `unstored` pages and loading all `pages` take less time than computing `pages`;
        False while the time of computing, storing or loading is needed and was not measured; a lookup that was not
        measured counts as 0 s. Before the first load, loading counts as being as fast as storing."""
        computing = self.compute_s(pages)
        storing = self._lanes[MoveKind.STORE].rate.seconds(unstored * self._page_bytes)
        loading = self._lanes[MoveKind.LOAD].rate.seconds(pages * self._page_bytes)
        if loading is None:
            # Before the first load, loading counts as being as fast as storing.
            loading = self._lanes[MoveKind.STORE].rate.seconds(pages * self._page_bytes)
        if computing is None or loading is None or (unstored and storing is None):
            return False
        return (storing or 0.0) + loading + (self._lookup.seconds(1) or 0.0) < computing
