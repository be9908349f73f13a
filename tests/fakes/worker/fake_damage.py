"""Why sequences of the fake worker end by an error where they would draw a token, and which pages that damages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire_common.errors import Internal, QuireError

if TYPE_CHECKING:
    from tests.fakes.worker.fake_slots import Slot
    from tests.fakes.worker.fake_worker import FakeWorker

Page = tuple[int, int]
"""Group and number."""


class FakeDamage:
    """NaN logits come of a damaged page, and so do those of all who read it, until it is written anew; a step that
    raises damages what it writes, a client's mistake nothing."""

    def __init__(self, worker: FakeWorker) -> None:
        self._worker = worker
        # By request id: the error, and from how many known tokens on.
        self.faults: dict[str, tuple[int, QuireError]] = {}
        self.pages: set[Page] = set()
        # By an error's id, the error and the damaged pages that its sequence had.
        self._of: dict[int, tuple[QuireError, set[Page]]] = {}

    def of(self, error: QuireError) -> set[Page]:
        """The damaged pages that the error's sequence had."""
        return self._of[id(error)][1] if id(error) in self._of else set()

    def draw_error(self, slot: Slot, count: int) -> QuireError | None:
        """Why the slot draws no token, after computing `count` positions."""
        worker = self._worker
        if not self.faults and not self.pages and worker.draw_error is None:
            return None
        used = -(-slot.computed // worker.page_size)
        held = [(group, page) for group, table in enumerate(slot.tables) for page in table[:used]]
        at, fault = self.faults.get(slot.start.context.request_id, (0, worker.draw_error))
        if fault is not None and len(slot.tokens) >= at:
            if fault.code == "NAN_LOGITS":
                self.pages.add(held[int(worker.rng.integers(0, len(held)))])
            elif fault.code == "STEP_FAILED":
                first = (slot.computed - count) // worker.page_size
                self.pages.update((group, p) for group, table in enumerate(slot.tables) for p in table[first:used])
        elif self.pages.isdisjoint(held):
            return None
        else:
            fault = Internal("NAN_LOGITS", "nan", "none")
        error = type(fault)(fault.code, fault.message, fault.fix)
        self._of[id(error)] = error, self.pages.intersection(held)
        return error
