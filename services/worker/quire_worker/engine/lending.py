"""Lending: pages that other workers may read, and how far those of each export are filled. Knows nothing of how they
travel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from quire_common.errors import Internal

if TYPE_CHECKING:
    from quire_common.credit import PageMove
    from quire_worker.engine.moves import Mover
    from quire_worker.engine.page_states import PageStates


@dataclass(slots=True)
class _Loan:
    """An export whose first `offered` pages are filled. These are `lent`: nobody fills them anew before it ends."""

    move: PageMove
    offered: int = 0


class Lending:
    """Belongs to the model thread."""

    def __init__(self, states: PageStates, mover: Mover) -> None:
        self._states = states
        self._mover = mover
        self._loans: dict[int, _Loan] = {}
        self._filling: dict[int, _Loan] = {}

    def begin(self, move: PageMove) -> None:
        """The mover has taken an export on."""
        self._loans[move.id] = self._filling[move.id] = _Loan(move)

    def end(self, move_id: int) -> None:
        """An export is over."""
        loan = self._loans.pop(move_id)
        self._filling.pop(move_id, None)
        self._states.lent[loan.move.device_page[: loan.offered]] -= 1

    def offer_ready(self) -> None:
        """Tell the mover of pages that have been filled since the last call. Until its last one is, an export costs one
        look at its next page."""
        for move_id, loan in list(self._filling.items()):
            pages, before = loan.move.device_page, loan.offered
            while loan.offered < len(pages) and self._is_ready(loan):
                loan.offered += 1
            if loan.offered > before:
                self._states.lent[pages[before : loan.offered]] += 1
                self._mover.offer(move_id, loan.offered)
            if loan.offered == len(pages):
                del self._filling[move_id]

    def clear(self) -> None:
        """All exports are over; the pages' own columns are cleared with the pages."""
        self._loans.clear()
        self._filling.clear()

    def check_integrity(self) -> None:
        """Raise Internal where lent pages and loans differ."""
        lent = np.zeros_like(self._states.lent)
        for loan in self._loans.values():
            lent[loan.move.device_page[: loan.offered]] += 1
        if not (lent == self._states.lent).all():
            raise Internal("INTEGRITY", "Lent pages and open exports differ.", "Report it with the worker's log.")

    def _is_ready(self, loan: _Loan) -> bool:
        pages, place, tail = loan.move.device_page, loan.offered, loan.move.tail_tokens
        needed = tail if tail and place == len(pages) - 1 else self._states.page_size
        return bool(self._states.ready[pages[place]] >= needed)
