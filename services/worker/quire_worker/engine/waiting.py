"""WaitingSlots: sequences whose cached range is not ready, and the pages that each of them waits for.

The verdict on a waiting slot is whether it runs, is lost or still waits. For each waiting slot, WaitingSlots notes two
of the pages that the slot waits for. While such a page is short (not filled as far as the slot needs) and a slot or
move is to fill it, the verdict cannot change. So one array operation checks the noted pages of all slots, and only the
other slots are judged in a step.

If a page under a waiting slot is to be filled anew (no scheduler asks for this), the verdict may come later, when the
noted page has come or is lost. WaitingSlots knows nothing of starts, moves, or the way in which a sequence ends.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from quire_common.errors import QuireError, Unavailable
from quire_worker.engine.page_states import NOBODY

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from quire_worker.arrays import Bool, Int32
    from quire_worker.engine.page_states import PageStates
    from quire_worker.engine.slots import SlotTable


class WaitingSlots:
    """The waiting slots and their noted pages. Belongs to the model thread."""

    def __init__(self, table: SlotTable, states: PageStates) -> None:
        self._table = table
        self._states = states
        self._slots: set[int] = set()
        self._order: NDArray[np.intp] | None = None
        self._seen_setbacks = 0
        # The two noted pages of each slot, with the positions that the slot needs of them; 0 positions: the slot must
        # be judged. `first` is the first short page of the cached range. `last` is the last page that must come before
        # the verdict can change, as long as no page loses the slot or move that was to fill it. So slots that wait for
        # a shared prefix, which is filled page by page, are not judged at each page.
        self._first = _Gates(table.num_slots)
        self._last = _Gates(table.num_slots)

    def __contains__(self, slot: int) -> bool:
        return slot in self._slots

    def add(self, slot: int) -> None:
        """Add a slot that has become WAITING."""
        self._slots.add(slot)
        self._order = None
        self._first.needed[slot] = self._last.needed[slot] = 0

    def discard(self, slot: int) -> None:
        """Remove a slot that runs or has ended."""
        self._slots.discard(slot)
        self._order = None

    def recheck_all(self) -> None:
        """Have `due` yield every slot again. Called when pages that were ready no longer are: each slot may wait for
        another page now."""
        self._first.needed.fill(0)
        self._last.needed.fill(0)

    def all(self) -> frozenset[int]:
        """The slots that wait."""
        return frozenset(self._slots)

    def due(self) -> Iterator[int]:
        """Yield the slots that may have become ready or lost, highest order key first. The caller must check each slot
        before it takes the next, and end it if it is lost, since the later slots are judged by the pages as they are
        then."""
        if not self._slots:
            return
        states, order = self._states, self._in_order()
        setback = states.setbacks != self._seen_setbacks
        self._seen_setbacks = states.setbacks
        place = 0
        while place < len(order):
            slots, seen = order[place:], states.setbacks
            for row in (~self._are_blocked(slots, setback)).nonzero()[0].tolist():
                yield int(slots[row])
                if states.setbacks != seen:
                    place, setback = place + row + 1, True
                    break
            else:
                return

    def check_slot(self, slot: int) -> QuireError | None:
        """Judge a waiting slot. If its cached range is ready, the slot runs. Returns PAGES_LOST if no slot or move will
        fill a page that the slot needs, and None if the slot runs or still waits. A lost page is judged only when the
        pages before it have come and the range's last move has ended.

        There is one exception: if failed moves alone left pages short, and no other slot holds the pages from the first
        of these on, the slot runs and fills them itself. Its cached range is cut before them."""
        table, states, size = self._table, self._states, self._states.page_size
        cached = int(table.computed[slot])
        pages = table.pages(slot)[: -(-cached // size)]
        needed = np.minimum(cached - np.arange(len(pages)) * size, size)
        short = states.ready[pages] < needed
        if short.any():
            writer = states.writer[pages]
            awaited = states.pending[pages] | ((writer != NOBODY) & (writer != slot))
            lost = (short & ~awaited).nonzero()[0]
            first_lost = int(lost[0]) if len(lost) else len(pages)
            # The verdict waits until the pages before the lost one have come, and the range's last move has ended.
            before = short[:first_lost].nonzero()[0]
            blocking = before if len(before) else first_lost + states.pending[pages[first_lost:]].nonzero()[0]
            if not len(before) and (writer[blocking] != NOBODY).any():
                # Both a move and a slot fill such a page; the slot waits only for the move: judge it at every step.
                self._first.needed[slot] = self._last.needed[slot] = 0
                return None
            if len(blocking):
                self._first.set(slot, pages, needed, int(blocking[0]))
                self._last.set(slot, pages, needed, int(blocking[-1]))
                return None
            if not states.failed[pages[lost]].all() or (states.refs[pages[first_lost:]] > 1).any():
                return _pages_lost()
            states.claim(pages[first_lost:], slot)
            table.cached_len[slot] = table.computed[slot] = first_lost * size
        table.run(slot)
        states.running[table.pages(slot)] += 1
        self.discard(slot)
        return None

    def _in_order(self) -> NDArray[np.intp]:
        """Return the waiting slots, highest order key first, then highest slot. The order is kept until a slot is added
        or removed."""
        if self._order is None:
            slots = np.fromiter(self._slots, np.intp, len(self._slots))
            self._order = slots[np.lexsort((slots, self._table.order_key[slots]))][::-1]
        return self._order

    def _are_blocked(self, slots: NDArray[np.intp], setback: bool) -> Bool:
        """For each slot, return whether its noted page is still short and a slot or move is to fill it. After a
        setback, the first page that the slot needs is noted in place of the last one, since a page between them may be
        lost."""
        states = self._states
        if setback:
            self._last.page[slots], self._last.needed[slots] = self._first.page[slots], self._first.needed[slots]
        page = self._last.page[slots]
        writer = states.writer[page]
        awaited = states.pending[page] | ((writer != NOBODY) & (writer != slots))
        blocked: Bool = awaited & (states.ready[page] < self._last.needed[slots])
        return blocked


class _Gates:
    """By slot, a page and how many of its positions are needed."""

    def __init__(self, num_slots: int) -> None:
        self.page = np.zeros(num_slots, np.int32)
        self.needed = np.zeros(num_slots, np.int32)

    def set(self, slot: int, pages: Int32, needed: NDArray[np.int64], place: int) -> None:
        self.page[slot], self.needed[slot] = pages[place], needed[place]


def _pages_lost() -> QuireError:
    """Return the error PAGES_LOST, of a slot that waited for pages whose writer or move ended before they were
    filled."""
    return Unavailable(
        "PAGES_LOST",
        "The slot waited for pages that another sequence or a move was filling, and that ended before it did.",
        "Start the sequence again.",
    )
