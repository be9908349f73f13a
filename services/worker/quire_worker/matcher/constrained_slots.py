"""ConstrainedSlots: the engine's slots whose sequences have grammars. It starts and ends these sequences at the
matcher.

A slot does not decode before the first mask of its sequence is there. After a step that found a mask missing, it does
not decode until that mask is there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire_common.errors import Unavailable
from quire_common.structured.capability import STRUCTURED_OUTPUT, check_capable
from quire_common.telemetry.logs import get_logger

if TYPE_CHECKING:
    from collections.abc import Iterable

    from quire_common.errors import QuireError
    from quire_common.sequence import Sequence
    from quire_worker.engine.ports import GrammarMatcher
    from quire_worker.engine.slots import SlotTable
    from quire_worker.matcher.row_constraint import RowConstraint

log = get_logger(__name__)


class ConstrainedSlots:
    """Belongs to the model thread. Without a matcher, no sequence has a grammar."""

    def __init__(self, table: SlotTable, matcher: GrammarMatcher | None) -> None:
        self._table = table
        self._matcher = matcher
        self._slots: dict[int, RowConstraint] = {}

    def check(self, sequence: Sequence) -> None:
        """Raise Unsupported for a sequence with a grammar if there is no matcher, or if the grammar is of another
        version."""
        if sequence.constraint is not None:
            check_capable(() if self._matcher is None else (STRUCTURED_OUTPUT,), sequence.constraint)

    def start_matcher(self, sequence: Sequence) -> None:
        """Start the matcher's processes if the sequence needs them. Raises Unavailable if the system refuses that. The
        sequence has no slot yet, so the error ends it alone."""
        if self._matcher is None or not _needs_masks(sequence):
            return
        try:
            self._matcher.start()
        except (OSError, RuntimeError) as error:
            log.warning("the matcher cannot be started", cause=str(error))
            raise Unavailable(
                "MATCHER_UNAVAILABLE",
                f"The process that applies grammars cannot be started: {error}.",
                "Let the worker open more files (ulimit -n) and start more threads.",
            ) from error

    def start(self, slot: int, sequence: Sequence) -> None:
        """Start to apply the grammar of a sequence that was put into its slot, if it has one and samples tokens. The
        slot does not decode before its first mask. Does nothing without a matcher."""
        if self._matcher is None or sequence.constraint is None or not _needs_masks(sequence):
            return
        constraint = self._matcher.open_sequence(sequence, sequence.constraint.text)
        self._slots[slot] = constraint
        self._table.constrain(slot, constraint)

    def end(self, slot: int) -> None:
        """End the sequence of a slot at the matcher, if it has a grammar, since it leaves the slot."""
        if self._matcher is not None and (constraint := self._slots.pop(slot, None)) is not None:
            self._matcher.close_sequence(constraint)

    def hold(self, slots: Iterable[int]) -> None:
        """Keep slots whose rows were held because a mask was missing out of further steps, and ask the matcher to say
        when the mask is there. Slots without a grammar are skipped."""
        for slot in slots:
            if self._matcher is not None and (constraint := self._slots.get(slot)) is not None:
                self._matcher.hold(constraint)
                self._table.set_awaits_mask(slot, True)

    def poll_failures(self) -> list[tuple[int, QuireError]]:
        """Process the matcher's messages, and update which slots await a mask. Returns (slot, error) for each slot
        whose grammar has failed, until `end`; an empty list if no sequence of the matcher has changed since the last
        call."""
        # Polled without slots too: else the next sequence would be told of a process that was lost before it.
        if self._matcher is None or not self._matcher.poll():
            return []
        failed = []
        for slot, constraint in self._slots.items():
            self._table.set_awaits_mask(slot, not constraint.is_ready)
            if constraint.failure is not None:
                failed.append((slot, constraint.failure))
        return failed


def _needs_masks(sequence: Sequence) -> bool:
    """Whether a sequence has a grammar and samples tokens."""
    return sequence.constraint is not None and sequence.stop.max_tokens != 0
