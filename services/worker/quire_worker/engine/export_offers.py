"""ExportOffers: the exports whose pages other workers may read, and how many pages of each are filled.

ExportOffers does not know how pages travel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from quire_common.errors import Internal

if TYPE_CHECKING:
    from quire_common.credit import PageMove
    from quire_worker.arrays import Int32
    from quire_worker.engine.page_states import PageStates
    from quire_worker.engine.transfer_agent import KvTransferAgent


@dataclass(slots=True, eq=False)
class _OpenExport:
    """An export whose first `offered` pages are filled and offered. No slot or move fills these again before the export
    ends."""

    move: PageMove
    offered: int = 0


class ExportOffers:
    """Keeps the open exports, and offers their pages once they are filled. Belongs to the model thread."""

    def __init__(self, states: PageStates, transfer_agent: KvTransferAgent) -> None:
        self._states = states
        self._transfer_agent = transfer_agent
        self._open: dict[int, _OpenExport] = {}
        # The exports with pages still to offer. For each: its next page, and how many positions of that must be filled.
        self._filling: list[_OpenExport] = []
        self._next: Int32 = np.zeros(0, np.int32)
        self._needed: Int32 = np.zeros(0, np.int32)

    def begin(self, move: PageMove) -> None:
        """Register an export that the KV transfer agent has accepted. `offer_ready` offers its pages as they are
        filled."""
        export = self._open[move.id] = _OpenExport(move)
        self._filling.append(export)
        self._next = np.append(self._next, move.device_page[0])
        self._needed = np.append(self._needed, self._positions(export))

    def end(self, move_id: int) -> None:
        """Forget an export that has ended. Its offered pages are no longer marked as exported, unless other exports
        offer them too, and may then be written again."""
        export = self._open.pop(move_id)
        if export.offered < len(export.move.device_page):
            self._drop([self._filling.index(export)])
        self._states.exported[export.move.device_page[: export.offered]] -= 1

    def offer_ready(self) -> None:
        """Offer, through the KV transfer agent, the pages of exports that were filled since the last call, and mark
        them as exported. The agent is told how many pages of an export were offered in all. Pages are offered in order:
        one that is not filled holds back those after it. One array operation checks the next page of every export that
        has pages left to offer."""
        if not self._filling:
            return
        ready = self._states.ready[self._next] >= self._needed
        if not ready.any():
            return
        whole = []
        for place in ready.nonzero()[0].tolist():
            export = self._filling[place]
            pages, before = export.move.device_page, export.offered
            while export.offered < len(pages) and self._states.ready[pages[export.offered]] >= self._positions(export):
                export.offered += 1
            self._states.exported[pages[before : export.offered]] += 1
            self._transfer_agent.offer_pages(export.move.id, export.offered)
            if export.offered == len(pages):
                whole.append(place)
            else:
                self._next[place], self._needed[place] = pages[export.offered], self._positions(export)
        if whole:
            self._drop(whole)

    def clear(self) -> None:
        """Forget all exports; the caller clears the pages' own columns."""
        self._open.clear()
        self._drop(list(range(len(self._filling))))

    def check_integrity(self) -> None:
        """Raise Internal unless each page is marked as exported by as many exports as have offered it and are open."""
        exported = np.zeros_like(self._states.exported)
        for export in self._open.values():
            exported[export.move.device_page[: export.offered]] += 1
        if not (exported == self._states.exported).all():
            raise Internal("INTEGRITY", "Lent pages and open exports differ.", "Report it with the worker's log.")

    def _positions(self, export: _OpenExport) -> int:
        """Return how many positions of the export's next page must be filled before that page is offered: all, or the
        tail's tokens on the last page."""
        tail = export.move.tail_tokens
        return tail if tail and export.offered == len(export.move.device_page) - 1 else self._states.page_size

    def _drop(self, places: list[int]) -> None:
        """Remove exports, by their places in the list, from the list of exports that still wait for pages to be
        filled."""
        gone = set(places)
        self._filling = [export for place, export in enumerate(self._filling) if place not in gone]
        self._next, self._needed = np.delete(self._next, places), np.delete(self._needed, places)
