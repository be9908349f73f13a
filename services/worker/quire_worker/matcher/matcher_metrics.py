"""MatcherMetrics: a worker's metrics of grammars and masks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire_common.telemetry import metrics

if TYPE_CHECKING:
    from collections.abc import Callable


class MatcherMetrics:
    """The share of one process in the worker's metrics. Belongs to the model thread, except `count_forced_tokens` and
    the last `set_mask_slots`, when the client is closed. A sequence is identified by its generation."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began_s: dict[int, float] = {}
        self._seen_masks = self._seen_mask_slots = (0, 0)
        self._first_mask_seconds = metrics.histogram(
            "quire_worker_first_mask_seconds",
            "Time from the start of a sequence with a grammar to its first mask, the wait for a mask slot included",
        )
        self._compile_seconds = metrics.histogram(
            "quire_worker_grammar_compile_seconds", "Time to compile the grammar of a sequence"
        )
        self._failures = metrics.counter("quire_worker_grammar_failures_total", "Sequences that ended by their grammar")
        self._masks = metrics.counter("quire_worker_masks_total", "Masks of grammars that the matcher made")
        self._mask_seconds = metrics.counter("quire_worker_mask_seconds_total", "Time that masks took to make")
        self._held = metrics.counter("quire_worker_held_rows_total", "Rows of a step whose mask had not come")
        self._forced = metrics.counter(
            "quire_worker_forced_tokens_total", "Tokens that a grammar forced and that were sampled with the one before"
        )
        self._replays = metrics.counter(
            "quire_worker_mask_replays_total", "Sequences that were replayed since a mask did not come"
        )
        self._constrained_slots = metrics.gauge("quire_worker_constrained_slots", "Slots whose sequence has a grammar")
        self._waiting = metrics.gauge(
            "quire_worker_constrained_waiting", "Sequences with a grammar that wait for a mask slot"
        )

    def record_start(self, generation: int, began_s: float | None = None) -> None:
        """Record that a sequence with a grammar was put into its slot, now or at `began_s` by the clock."""
        self._began_s[generation] = self._clock() if began_s is None else began_s

    def record_end(self, generation: int) -> float | None:
        """Record that a sequence has left its slot, or goes to another process. Returns when it was put into its slot;
        None if it has had a mask since."""
        return self._began_s.pop(generation, None)

    def record_opening(self, generation: int, compile_us: int) -> None:
        """Record the compilation of a grammar. The time from the sequence's start to its first mask is observed once
        per sequence, and not for replays."""
        self._compile_seconds.observe(compile_us / 1e6)
        began_s = self._began_s.pop(generation, None)
        if began_s is not None:
            self._first_mask_seconds.observe(self._clock() - began_s)

    def count_failure(self) -> None:
        """Count a sequence that failed because of its grammar, or because its masks did not come."""
        self._failures.inc()

    def count_held_row(self) -> None:
        """Count a row that was held because its mask was missing."""
        self._held.inc()

    def count_forced_tokens(self, count: int) -> None:
        """Count forced tokens that were drafts, and that the device kept. Called on the device's thread."""
        self._forced.inc(count)

    def count_replay(self) -> None:
        """Count a sequence that is replayed because its mask is overdue."""
        self._replays.inc()

    def set_mask_slots(self, used: int, waiting: int) -> None:
        """Set the number of sequences of this process that have a mask slot, and of those that wait for one."""
        self._constrained_slots.inc(used - self._seen_mask_slots[0])
        self._waiting.inc(waiting - self._seen_mask_slots[1])
        self._seen_mask_slots = used, waiting

    def record_masks(self, made: tuple[int, int]) -> None:
        """Record by how much the totals of the process have grown since the last call: its masks, and the nanoseconds
        that they took."""
        if made != self._seen_masks:
            self._masks.inc(made[0] - self._seen_masks[0])
            self._mask_seconds.inc((made[1] - self._seen_masks[1]) / 1e9)
            self._seen_masks = made
