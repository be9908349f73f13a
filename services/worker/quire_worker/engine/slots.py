"""SlotTable: the state of every sequence that the worker holds, as columns by slot.

SlotTable only holds numbers. admission.py decides which sequence may start, and step_schedule.py decides which slots
run. A slot that ends is cleared at once, so that the next request in it can read nothing of the former one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from quire_common.sequence import RequestContext
from quire_worker.sampling.logits_state import LogitsState
from quire_worker.sampling.param_rows import PARAM_ROW, param_row

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from quire_common.credit import Start
    from quire_worker.arrays import Int32
    from quire_worker.engine.spec import EngineSpec
    from quire_worker.matcher.row_constraint import RowConstraint

NO_CONTEXT = RequestContext("")
NOT_ORDERED = np.iinfo(np.int32).max
NO_LIMIT = np.iinfo(np.int32).max


class SlotState:
    """IDLE -> WAITING (for its cached range, if it has one) -> RUNNING -> IDLE. The states are plain integers:
    comparing a numpy value with an enum member takes 3.6 us, and each slot's life has a dozen comparisons."""

    IDLE: Final = 0
    WAITING: Final = 1
    RUNNING: Final = 2


class SlotTable:
    """One entry per slot in each column. Positions and lengths count tokens from the sequence's first."""

    def __init__(self, spec: EngineSpec) -> None:
        n = spec.num_slots
        self._spec = spec
        self.page_size = spec.page_size
        self.state = np.zeros(n, np.int8)
        self.token = np.zeros((n, spec.max_model_len), np.int32)
        """The tokens that are prefilled. Tokens that this worker samples stay on the device."""
        self.slot_generation = np.zeros(n, np.int64)
        """A number for each sequence that ever held a slot, from 1, never used twice; 0: idle."""
        self.computed = np.zeros(n, np.int32)
        """Positions whose KV is in the pages, or will be before the slot runs again. A step in flight counts with all
        positions that it may compute. If a row keeps fewer tokens than it tried, the ended step subtracts the rest."""
        self.decoding = np.zeros(n, np.bool_)
        """Whether the last prefill chunk was launched."""
        self.bound = np.zeros(n, np.int32)
        """The step that computes up to here is the sequence's last, by length."""
        self.last_step = np.zeros(n, np.int64)
        """The last step that was launched with the slot."""
        self.known_len = np.zeros(n, np.int32)
        """Tokens of the sequence, those of steps in flight left out."""
        self.prompt_len = np.zeros(n, np.int32)
        self.prefill_len = np.zeros(n, np.int32)
        """Tokens at the start: positions before it are prefill."""
        self.cached_len = np.zeros(n, np.int32)
        self.limit = np.zeros(n, np.int32)
        self.min_len = np.zeros(n, np.int32)
        """Tokens before which no stop id may be sampled."""
        self.prefill_only = np.zeros(n, np.bool_)
        self.num_pages = np.zeros(n, np.int32)
        self.page_table = np.zeros((n, spec.table_width), np.int32)
        self.shown_page = np.zeros((n, spec.table_width), np.int32)
        """`page_table` as far as steps have come: pages granted ahead are 0."""
        self.order_key = np.zeros(n, np.int64)
        self.prefill_rank = np.full(n, NOT_ORDERED, np.int32)
        self.stop_id = np.full((n, spec.max_stop_ids + len(spec.eos_token_ids)), -1, np.int32)
        self.num_stop = np.zeros(n, np.int32)
        self.params = np.zeros(n, PARAM_ROW)
        self.logprobs = np.zeros(n, np.int32)
        self.scored = np.zeros(n, np.int32)
        """1 + the number of alternatives to report for each prompt token; 0: no prompt logprobs."""
        self.started_ns = np.zeros(n, np.int64)
        self.first_token_ns = np.zeros(n, np.int64)
        self.controlled = np.zeros(n, np.bool_)
        self.most_drafts = np.zeros(n, np.int32)
        """The most drafts that the slot's row may have; 0 if the request changes logits, such as by penalties, biases,
        a thinking budget or logits processors."""
        self.unforced_rows = np.zeros(n, np.int32)
        """For a slot with a grammar: how many of its latest rows, without a gap, kept at most one token. Only steps
        that were launched with drafts count."""
        self.controls: list[LogitsState | None] = [None] * n
        """The logits processor states of the sequences that have one."""
        self.constraints: list[RowConstraint | None] = [None] * n
        """The constraints of the sequences that have a grammar."""
        self.constrained = np.zeros(n, np.bool_)
        self.awaits_mask = np.zeros(n, np.bool_)
        """Whether the next mask of the slot's grammar is still to come: it has no row once its prompt is computed."""
        self.context = [NO_CONTEXT] * n
        self.version = 0
        """Changes with every start and end, and when a waiting slot runs. Values derived from the fixed columns and
        from `state` hold until then."""
        self._generations = 0
        self._by_key: NDArray[np.intp] | None = None
        self._may_draft: bool | None = None
        self._any_constrained: bool | None = None
        self._scalars = [
            column
            for name, column in vars(self).items()
            if isinstance(column, np.ndarray) and column.ndim == 1 and name != "prefill_rank"
        ]

    @property
    def num_slots(self) -> int:
        """Rows of the table."""
        return len(self.state)

    def ceiling(self) -> Int32:
        """By slot, the position up to which the slot may compute: its limit, but never past its pages."""
        return np.minimum(self.limit, self.num_pages * self.page_size)

    def by_key(self) -> NDArray[np.intp]:
        """Return the slots that hold a sequence, lowest order key first, then lowest slot. The array is kept until a
        slot starts, ends, or runs after waiting."""
        if self._by_key is None:
            held = self.state.nonzero()[0]
            self._by_key = held[self.order_key[held].argsort(kind="stable")]
        return self._by_key

    def may_draft(self) -> bool:
        """Whether any slot may have drafts."""
        if self._may_draft is None:
            self._may_draft = bool(self.most_drafts.any())
        return self._may_draft

    def any_constrained(self) -> bool:
        """Whether any slot has a grammar."""
        if self._any_constrained is None:
            self._any_constrained = bool(self.constrained.any())
        return self._any_constrained

    def pages(self, slot: int) -> Int32:
        """The slot's page table, as a view."""
        return self.page_table[slot, : self.num_pages[slot]]

    def show_pages(self, slots: Int32, position: Int32, end: Int32, singles: int) -> None:
        """Copy page table entries to `shown_page`, as far as a step needs them. The step computes the positions from
        `position` up to `end` (exclusive) of each slot, one position for each of the first `singles` slots. Pages
        granted further ahead stay 0 in `shown_page`."""
        entered = (position[:singles] % self.page_size == 0).nonzero()[0]
        if len(entered):
            slot, page = slots[entered], position[entered] // self.page_size
            self.shown_page[slot, page] = self.page_table[slot, page]
        for slot, last in zip(slots[singles:].tolist(), end[singles:].tolist(), strict=True):
            needed = -(-last // self.page_size)
            self.shown_page[slot, :needed] = self.page_table[slot, :needed]

    def started(self) -> int:
        """Number of slots that hold a sequence."""
        return int(np.count_nonzero(self.state))

    def fill(self, start: Start, stop_ids: tuple[int, ...], now_ns: int) -> None:
        """Write a checked Start into the columns of its idle slot: tokens, lengths, limits, pages, sampling, stop ids
        and logits processor state. The slot becomes WAITING and gets a new slot generation. `now_ns` is the present
        wall-clock time, at which traces let the sequence start."""
        slot, sequence = start.slot, start.sequence
        prompt, known = len(sequence.prompt_ids), sequence.known_len
        stop, sampling = sequence.stop, sequence.sampling
        self.token[slot, :prompt] = sequence.prompt_ids
        self.token[slot, prompt:known] = sequence.output_ids
        self.prompt_len[slot] = prompt
        self.known_len[slot] = self.prefill_len[slot] = known
        self.cached_len[slot] = self.computed[slot] = min(start.cached_len, known - 1)
        self.limit[slot] = min(start.limit, NO_LIMIT)
        final_len = min(prompt + stop.max_tokens, start.max_model_len)
        self.bound[slot] = known if stop.max_tokens == 0 else final_len - 1
        self.min_len[slot] = min(prompt + stop.min_tokens, NO_LIMIT)
        self.prefill_only[slot] = stop.max_tokens == 0
        table = start.pages[0]
        self.num_pages[slot] = len(table)
        self.page_table[slot, : len(table)] = table
        self.order_key[slot] = start.order_key
        self.stop_id[slot, : len(stop_ids)] = stop_ids
        self.num_stop[slot] = len(stop_ids)
        self.params[slot] = param_row(sampling)
        self.logprobs[slot] = sampling.logprobs
        controls = self.controls[slot] = LogitsState.of(sequence, self._spec.logits_processors)
        self.controlled[slot] = controls is not None
        self.most_drafts[slot] = self._most_drafts(slot, self._spec.max_row_tokens)
        self.scored[slot] = 1 + sampling.prompt_logprobs
        self.started_ns[slot] = now_ns
        self.context[slot] = start.context
        self.state[slot] = SlotState.WAITING
        self._generations += 1
        self.slot_generation[slot] = self._generations
        self._changed()

    def constrain(self, slot: int, constraint: RowConstraint) -> None:
        """Give a grammar to a slot that was filled. From now on the slot awaits the grammar's first mask, and forced
        tokens are its drafts."""
        self.constraints[slot] = constraint
        self.constrained[slot] = self.awaits_mask[slot] = True
        self.most_drafts[slot] = self._most_drafts(slot, self._spec.max_constrained_row_tokens)
        self._changed()

    def run(self, slot: int) -> None:
        """Make a filled slot RUNNING."""
        self.state[slot] = SlotState.RUNNING
        self._changed()

    def _most_drafts(self, slot: int, row_tokens: int) -> int:
        """Return the most drafts of the slot's row, which samples at most `row_tokens` tokens in a step."""
        controls = self.controls[slot]
        return row_tokens - 1 if controls is None or not controls.changes_logits else 0

    def count_unforced_rows(self, slots: Int32, tokens: Int32) -> None:
        """Count the rows without a forced token, for slots with a grammar, and set the count of the other slots to 0.
        `tokens`: how many tokens each slot kept in a step that was launched with drafts."""
        is_unforced = self.constrained[slots] & (tokens <= 1)
        self.unforced_rows[slots] = np.where(is_unforced, self.unforced_rows[slots] + 1, 0)

    def set_awaits_mask(self, slot: int, awaits: bool) -> None:
        """Note whether the next mask of a slot's grammar is still to come."""
        self.awaits_mask[slot] = awaits

    def clear(self, slot: int) -> None:
        """Make a slot IDLE, remove everything of its sequence from the columns, and mark its logits processor state as
        ended."""
        self.token[slot, : self.prefill_len[slot]] = 0
        self.page_table[slot, : self.num_pages[slot]] = self.shown_page[slot, : self.num_pages[slot]] = 0
        self.stop_id[slot, : self.num_stop[slot]] = -1
        for column in self._scalars:
            column[slot] = 0
        self.prefill_rank[slot] = NOT_ORDERED
        controls, self.controls[slot] = self.controls[slot], None
        if controls is not None:
            controls.ended = True
        self.constraints[slot] = None
        self.context[slot] = NO_CONTEXT
        self._changed()

    def _changed(self) -> None:
        """Invalidate what was derived from the columns before."""
        self.version += 1
        self._by_key = self._may_draft = self._any_constrained = None
