"""ResidentSlots: sequences come into slots, wait until their cached range is ready, grow, and leave.

ResidentSlots keeps SlotTable and PageStates in agreement. Other modules write some columns directly: limits and the
prefill order (GrantRules), known lengths (step_completion), the shown pages (StepBuilder), and the marks of moves and
exports (MoveManager, ExportOffers). ResidentSlots does not know the order of Grants, or steps.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from quire_common.credit import Finish
from quire_common.errors import FailedPrecondition, Internal, QuireError
from quire_worker.engine.admission import bad_pages, check_start, grantable, stop_ids_of, table_full
from quire_worker.engine.page_states import NOBODY, PageStates
from quire_worker.engine.ports import SlotTrace
from quire_worker.engine.slots import SlotState, SlotTable
from quire_worker.engine.waiting import WaitingSlots
from quire_worker.matcher.constrained_slots import ConstrainedSlots

if TYPE_CHECKING:
    from quire_common.credit import Start
    from quire_worker.arrays import Bool, Int32, Int64
    from quire_worker.engine.ports import GrammarMatcher, Observer
    from quire_worker.engine.spec import EngineSpec


class ResidentSlots:
    """All methods belong to the model thread."""

    def __init__(self, spec: EngineSpec, observer: Observer, matcher: GrammarMatcher | None = None) -> None:
        self.spec = spec
        self.table = SlotTable(spec)
        self._constrained = ConstrainedSlots(self.table, matcher)
        self.states = PageStates(spec.num_pages, spec.page_size)
        self.settled = 0
        """The last step that was settled; steps after it may be in flight."""
        self.awaiting_first_token: set[int] = set()
        """Slots whose prompt is computed, but whose sequence was held when it should have sampled its first token."""
        self._observer = observer
        self._waiting = WaitingSlots(self.table, self.states)
        self._late: dict[int, int] = {}

    def settle(self, step: int) -> None:
        """Record that this step, and all before it, have ended."""
        self.settled = step

    def holds(self, slot: int) -> bool:
        """Whether the slot exists and is not idle."""
        return 0 <= slot < self.spec.num_slots and self.table.state[slot] != SlotState.IDLE

    def start(self, start: Start) -> None:
        """Put a sequence into its slot, and start its grammar, if it has one and samples tokens. Without a cached range
        the slot runs at once, else it waits until the range is ready. The range never includes the last known token.
        The slot becomes the writer of all pages that the range does not fill. Raises the slot's QuireError if the Start
        is impossible, this worker cannot apply its kind of grammar or start the matcher, or others use a page that the
        slot is to write (see `_check_free`); the slot is then idle. A grammar that does not compile ends the slot
        later."""
        check_start(start, self.spec)
        self._constrained.check(start.sequence)
        table = start.pages[0]
        cached = min(start.cached_len, start.sequence.known_len - 1)
        own = table[cached // self.spec.page_size :]
        fresh = table[-(-cached // self.spec.page_size) :]
        self._check_free(own, fresh)
        self._constrained.start_matcher(start.sequence)
        self.table.fill(start, stop_ids_of(start, self.spec), time.time_ns())
        self._constrained.start(start.slot, start.sequence)
        self.states.refs[table] += 1
        # In the page in which the cached range ends, first a move fills positions, then the slot.
        self.states.writer[own] = start.slot
        self.states.claim(fresh, start.slot)
        if cached:
            self._waiting.add(start.slot)
        else:
            self.table.run(start.slot)
            self.states.running[table] += 1

    def grow(self, slot: int, page: int) -> None:
        """Append a page to a held slot's table, for the slot to fill. Raises the slot's QuireError if the page is
        invalid or taken, or the table is full."""
        pages = np.array([page], np.int32)
        if not grantable(pages, self.spec) or page in self.table.pages(slot):
            raise bad_pages(pages)
        self._check_free(pages, pages)
        count = int(self.table.num_pages[slot])
        if count == self.spec.table_width:
            raise table_full(self.spec)
        self.table.page_table[slot, count] = page
        self.table.num_pages[slot] = count + 1
        self.states.refs[page] += 1
        self.states.running[page] += self.table.state[slot] == SlotState.RUNNING
        self.states.claim(pages, slot)

    def grow_all(self, slots: Int32, pages: Int32) -> bool:
        """Append pages to the tables of held slots, as `grow` does for each, in one operation. If some page or slot may
        be invalid, changes nothing and returns False: the caller must then call `grow` for each."""
        table, states = self.table, self.states
        if not grantable(pages, self.spec) or len(np.unique(pages)) != len(pages):
            return False
        # A page that nobody holds is in no table.
        free = (states.refs[pages] == 0) & (states.writer[pages] == NOBODY) & ~states.pending[pages]
        if not (free & (states.exported[pages] == 0) & (states.busy_until[pages] <= self.settled)).all():
            return False
        order = slots.argsort(kind="stable")
        slots, pages = slots[order], pages[order]
        first = np.searchsorted(slots, slots)
        place = table.num_pages[slots] + np.arange(len(slots), dtype=np.int32) - first
        if int(place.max()) >= self.spec.table_width:
            return False
        table.page_table[slots, place] = pages
        np.add.at(table.num_pages, slots, 1)
        states.refs[pages] += 1
        states.running[pages] += table.state[slots] == SlotState.RUNNING
        states.claim(pages, slots)
        return True

    def void(self, pages: Int32) -> None:
        """Mark the pages that no slot or move will fill as empty, so that a slot that starts on them finds them lost.
        Slots that wait for such pages are checked again. Pages that a slot or a move is filling stay unchanged. Does
        nothing if a running slot holds one of the other pages."""
        pages = pages[(pages >= 1) & (pages < self.spec.num_pages)]
        states = self.states
        idle = pages[(states.writer[pages] == NOBODY) & ~states.pending[pages]]
        held = states.refs[idle] > 0
        if held.any():
            if self._in_use(idle[held]):
                return
            self._waiting.recheck_all()
        states.ready[idle] = 0

    def note_launch(self, slots: Int32, end: Int32, step: int, decodes: int) -> None:
        """Record the launch of a step that computes these slots up to `end` at most. From now on, the positions before
        `end` count as computed. The first `decodes` slots decode already. Each of the others prefills, and decodes from
        now on if this step reaches the end of its prefill."""
        self.table.computed[slots] = end
        if decodes < len(slots):
            chunks = slots[decodes:]
            self.table.decoding[chunks] = end[decodes:] >= self.table.prefill_len[chunks]
        self.table.last_step[slots] = step

    def note_first_tokens(self, sampled: Int32, held: Int32, now_ns: int) -> None:
        """Note the time of the first token of each slot in `sampled` that had none before. These slots leave
        `awaiting_first_token`; the slots in `held`, whose prompt is computed and which sampled no token, enter it."""
        table = self.table
        first = sampled[table.first_token_ns[sampled] == 0]
        table.first_token_ns[first] = now_ns
        self.awaiting_first_token.update(held.tolist())
        self.awaiting_first_token.difference_update(first.tolist())

    def subtract_uncomputed(self, slots: Int32, positions: Int32) -> None:
        """Subtract positions that were counted at a step's launch and that the step did not compute after all."""
        self.table.computed[slots] -= positions

    def stop(self, slot: int) -> None:
        """End a held slot because the scheduler has stopped it. If steps of it are in flight, its slot generation
        counts as late, so that their rows are still reported."""
        last_step = int(self.table.last_step[slot])
        if last_step > self.settled:
            self._late[int(self.table.slot_generation[slot])] = last_step
        self.end(slot, None)

    def are_late(self, slot_generation: Int64) -> Bool:
        """For each slot generation, whether its sequence was stopped while steps of it were in flight."""
        return np.isin(slot_generation, list(self._late))

    def late_end(self, slot_generation: int) -> None:
        """Note that a stopped sequence has ended by itself in a step: its rows in later steps are not reported."""
        del self._late[slot_generation]

    def forget_late(self) -> None:
        """Forget the stopped sequences whose last step was settled: no row of theirs can come any more."""
        if self._late:
            self._late = {slot_generation: step for slot_generation, step in self._late.items() if step > self.settled}

    def end(self, slot: int, finish: Finish | None, error: QuireError | None = None) -> None:
        """End a held slot: release its pages, clear its columns, end its grammar, and give the observer its trace, with
        `finish` (None: stopped, or its run ended) and the code of `error`, with which a failed sequence ends. Its pages
        stay busy until its steps in flight have ended. Slots that wait for pages which it was to fill find these
        lost."""
        table = self.table
        if table.last_step[slot] > self.settled:
            self.states.busy_until[table.pages(slot)] = table.last_step[slot]
        trace = SlotTrace(
            context=table.context[slot],
            started_ns=int(table.started_ns[slot]),
            first_token_ns=int(table.first_token_ns[slot]),
            ended_ns=time.time_ns(),
            prompt_tokens=int(table.prompt_len[slot]),
            cached_tokens=int(table.cached_len[slot]),
            output_tokens=int(table.known_len[slot] - table.prompt_len[slot]),
            finish=finish,
            error_code="" if error is None else error.code,
        )
        self.states.release(table.pages(slot), slot, running=bool(table.state[slot] == SlotState.RUNNING))
        table.clear(slot)
        self._constrained.end(slot)
        self.awaiting_first_token.discard(slot)
        self._waiting.discard(slot)
        self._observer.slot_ended(trace)

    def hold(self, slots: Int32) -> None:
        """Keep slots out of further steps until their masks have come. Their rows were held because the masks were
        missing."""
        self._constrained.hold(slots.tolist())

    def admit_ready(self) -> list[tuple[int, QuireError]]:
        """Run each waiting slot whose cached range is ready, or that may compute the rest itself, since only failed
        moves left pages short (see WaitingSlots.check_slot). End each other slot that waits for pages that no slot or
        move will fill, and each slot whose grammar cannot go on. Returns the ended slots with their errors. Also takes
        in which slots still await a mask of their grammar. Slots are checked from the highest order key down. So if
        several slots hold pages that failed moves left short, the oldest stays, and computes them itself."""
        lost: list[tuple[int, QuireError]] = []
        for slot in self._waiting.due():
            error = self._waiting.check_slot(slot)
            if error is not None:
                lost.append((slot, error))
                self.end(slot, Finish.ERROR, error)
        for slot, error in self._constrained.poll_failures():
            lost.append((slot, error))
            self.end(slot, Finish.ERROR, error)
        return lost

    def computed_one(self, slots: Int32, end: Int32) -> None:
        """Raise the page watermarks after a step that filled one position of each slot, the one before `end`."""
        size, table = self.spec.page_size, self.table
        last = (end - 1) // size
        self.states.fill(table.page_table[slots, last], end - last * size)

    def computed_to(self, slots: Int32, first: Int32, end: Int32) -> None:
        """Raise the page watermarks after a step that filled the positions from `first` up to `end` (exclusive) of each
        slot. The range may be empty."""
        some = end > first
        if not some.all():
            slots, first, end = slots[some], first[some], end[some]
        self.computed_one(slots, end)
        size, table = self.spec.page_size, self.table
        begin, last = first // size, (end - 1) // size
        for row in (begin < last).nonzero()[0].tolist():
            whole = table.page_table[slots[row], begin[row] : last[row]]
            self.states.fill(whole, np.full(len(whole), size, np.int32))

    def can_load(self, pages: Int32) -> bool:
        """Whether a move may write these pages. Each must be in the pool and named once. No other slot, move or step in
        flight may be going to write them, and no running slot or other worker may read them. One exception: a waiting
        slot may be the writer of the page in which its cached range ends."""
        states, table = self.states, self.table
        if not grantable(pages, self.spec) or len(np.unique(pages)) != len(pages) or states.exported[pages].any():
            return False
        if states.pending[pages].any() or (states.busy_until[pages] > self.settled).any() or self._in_use(pages):
            return False
        written = pages[states.writer[pages] != NOBODY]
        if not len(written):
            return True
        # Of a waiting slot's own pages only the one in which its cached range ends may be filled by a move first.
        slots = states.writer[written]
        cached_pages = -(-table.computed[slots] // self.spec.page_size)
        return bool(((cached_pages > 0) & (table.page_table[slots, cached_pages - 1] == written)).all())

    def can_pull(self, pages: Int32, tail_tokens: int) -> bool:
        """Whether a pull may write these pages (see `can_load`); there must be at least one, and the last holds
        `tail_tokens` tokens, which must be less than a page, or is whole if that is 0."""
        return len(pages) > 0 and self.can_load(pages) and 0 <= tail_tokens < self.spec.page_size

    def can_store(self, pages: Int32) -> bool:
        """Whether all these pages are full, so that they may be stored."""
        return grantable(pages, self.spec) and bool((self.states.ready[pages] == self.spec.page_size).all())

    def can_export(self, pages: Int32, tail_tokens: int) -> bool:
        """Whether these pages, filled or not, may be promised to another worker: there must be at least one, each must
        be in the pool and named once, and `tail_tokens` must be less than a page."""
        named = len(pages) > 0 and grantable(pages, self.spec) and len(np.unique(pages)) == len(pages)
        return named and 0 <= tail_tokens < self.spec.page_size

    def clear(self) -> None:
        """End all sequences, without a finish, and forget the state of all pages."""
        for slot in self.table.state.nonzero()[0].tolist():
            self.end(slot, None)
        self.states.clear()
        self._late.clear()

    def check_integrity(self) -> None:
        """Raise Internal INTEGRITY if columns of slots and pages contradict each other. The numbers of holders and of
        running holders of each page must be those of the slots' tables, and each writer must hold its page. Also
        checked are each slot's table, computed positions and known tokens, the bounds of watermarks, that page 0 is
        unused and no pending page has a watermark, which slots wait, and that idle slots have no tokens and pages.
        The marks of failed, exported and busy pages are not checked here."""
        table, states = self.table, self.states
        held = table.state.nonzero()[0].tolist()
        refs, running = np.zeros_like(states.refs), np.zeros_like(states.running)
        for slot in held:
            pages = table.pages(slot)
            refs[pages] += 1
            running[pages] += table.state[slot] == SlotState.RUNNING
            _require(len(np.unique(pages)) == len(pages), f"slot {slot} holds a page twice")
            _require(table.cached_len[slot] <= table.computed[slot], f"slot {slot} lost computed positions")
            _require(table.computed[slot] <= table.bound[slot], f"slot {slot} computed past its end")
            exact = table.last_step[slot] <= self.settled and table.decoding[slot] and not table.prefill_only[slot]
            known = table.known_len[slot] - 1
            _require(not exact or table.computed[slot] == known, f"slot {slot} lost count of its positions")
            known = max(table.prefill_len[slot], table.computed[slot] + 1)
            _require(table.known_len[slot] <= known, f"slot {slot} knows tokens of the future")
            _require(not table.page_table[slot, len(pages) :].any(), f"slot {slot} has pages past its table")
        _require(bool((refs == states.refs).all()), "page references do not add up")
        _require(bool((running == states.running).all()), "the running holders of pages do not add up")
        for page in (states.writer != NOBODY).nonzero()[0].tolist():
            writer = int(states.writer[page])
            _require(self.holds(writer) and page in table.pages(writer), f"page {page} has a writer that is gone")
        _require(bool(((states.ready >= 0) & (states.ready <= states.page_size)).all()), "a watermark is off its page")
        _require(states.refs[0] == 0 and states.ready[0] == 0, "the dummy page was granted")
        _require(not (states.pending & (states.ready > 0)).any(), "a page is ready and still awaited")
        waiting = set((table.state == SlotState.WAITING).nonzero()[0].tolist())
        _require(waiting == self._waiting.all(), "the waiting set differs from the states")
        idle = table.state == SlotState.IDLE
        _require(not (table.known_len[idle].any() or table.num_pages[idle].any()), "an idle slot was not cleared")

    def _check_free(self, own: Int32, fresh: Int32) -> None:
        """Raise PAGE_TAKEN for pages that a slot cannot write. `own` are all pages that the slot is to write. None of
        them may be filled by another slot, read by a running slot, or written by a step in flight of a former holder.
        `fresh` are the same pages without the page in which the cached range ends. None of these may be filled by a
        move or offered by an export."""
        states = self.states
        busy = (states.busy_until[own] > self.settled).any()
        taken = (
            busy or (states.writer[own] != NOBODY).any() or states.pending[fresh].any() or states.exported[fresh].any()
        )
        if taken or (states.refs[own].any() and self._in_use(own)):
            raise _page_taken_error()

    def _in_use(self, pages: Int32) -> bool:
        """Whether a running slot holds one of the pages."""
        return bool(self.states.running[pages].any())


def _require(condition: bool, what: str) -> None:
    """Raise Internal INTEGRITY, naming what is inconsistent, unless the condition holds."""
    if not condition:
        raise Internal("INTEGRITY", f"The engine's state is inconsistent: {what}.", "Report it with the worker's log.")


def _page_taken_error() -> QuireError:
    """Return the error PAGE_TAKEN, for a Grant by which a slot would write a page that others may still write or
    read."""
    return FailedPrecondition(
        "PAGE_TAKEN",
        "The slot was granted a page that another slot, a move or a step in flight may still write, or that is lent.",
        "Grant a page for writing only when nobody else fills it, when the steps of its last holder have ended, and "
        "when its exports have been reported.",
    )
