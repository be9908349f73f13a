"""StepBuilder: makes a StepBatch from a StepSchedule, by gathering the columns of the slots that run."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from quire_worker.step import PromptScores, StepBatch

if TYPE_CHECKING:
    from quire_worker.arrays import Bool, Int32, Int64
    from quire_worker.engine.slots import SlotTable
    from quire_worker.engine.step_schedule import StepSchedule
    from quire_worker.matcher.row_constraint import RowConstraint
    from quire_worker.sampling.logits_state import LogitsState

# The device's own columns, and those that are not by sequence.
_NOT_SELECTED = (
    "token", "blocked", "controls", "constraints", "scores", "drafts", "formed_ns",
    "slot", "fed", "last", "bound", "min_len", "stop_id",
)  # fmt: skip  # a list of names
_NONE = np.empty(0, np.int32)


class StepBuilder:
    """Gathers by fancy indexing. Columns that the start of a sequence fixes are gathered once and kept while the same
    slots run. So steady decode costs the same few operations at any number of rows. Kept arrays are shared between
    batches."""

    def __init__(self, table: SlotTable) -> None:
        self._table = table
        self._fixed: _Fixed | None = None

    def build(self, schedule: StepSchedule) -> StepBatch:
        """Return the StepBatch for a schedule: tokens, positions, page tables, sampling and stop columns of its slots,
        blocked stop ids and prompt scores. Rows that sample in this step also have their grammar and logits processor
        state. Tokens of decode rows are 0, since the device fills them in. The arrays are copies, since the table may
        change while the step runs. The table's `shown_page` is brought up to this step."""
        table, slots, count, decodes = self._table, schedule.slot, schedule.count, schedule.decodes
        fixed = self._gather(slots)
        position = table.computed[slots]
        end = position + count
        rows = schedule.num_decode_tokens
        table.show_pages(slots, position, end, decodes if rows == decodes else 0)
        if decodes == len(slots):
            token, sample, fed = np.zeros(rows, np.int64), fixed.everyone, fixed.everyone
            scores: dict[int, PromptScores] = {}
        else:
            token = self._tokens(slots, position, end, decodes, rows)
            sample = (end >= fixed.prefill_len) & ~fixed.prefill_only
            fed = np.arange(len(slots)) < decodes
            scores = self._scores(slots, position, end, decodes)
        width = -(-int(end.max()) // table.page_size)
        return StepBatch(
            token=token,
            count=count,
            position=position,
            page_table=table.shown_page[slots, :width],
            sample=sample,
            blocked=self._blocked_ids(fixed, sample, end),
            controls={row: each for row, each in fixed.controls.items() if sample[row]} if fixed.controls else {},
            constraints={row: each for row, each in fixed.constraints.items() if sample[row]},
            scores=scores,
            drafts=np.where(fed, count - 1, 0) if rows > decodes else _NONE,
            formed_ns=time.monotonic_ns(),
            slot=slots,
            fed=fed,
            last=end >= fixed.bound,
            **fixed.columns,
        )

    def _gather(self, slots: Int32) -> _Fixed:
        """Return the columns that the slots' starts have fixed. While the same slots run and the table's
        version is the same, these are the columns of the last call."""
        table, fixed = self._table, self._fixed
        if fixed is None or fixed.version != table.version or not np.array_equal(fixed.slot, slots):
            fixed = self._fixed = _Fixed(
                version=table.version,
                slot=slots,
                everyone=np.ones(len(slots), np.bool_),
                prefill_len=table.prefill_len[slots],
                prefill_only=table.prefill_only[slots],
                bound=table.bound[slots],
                min_len=table.min_len[slots],
                early=bool((table.min_len[slots] > table.known_len[slots]).any()),
                controls=self._controls(slots),
                constraints=self._constraints(slots),
                columns={
                    "params": table.params.take(slots),
                    "logprobs": table.logprobs[slots],
                    "bound": table.bound[slots],
                    "min_len": table.min_len[slots],
                    "stop_id": table.stop_id[slots, : int(table.num_stop[slots].max())],
                },
            )
        return fixed

    def _scores(self, slots: Int32, position: Int32, end: Int32, decodes: int) -> dict[int, PromptScores]:
        """Return, by row, the prompt tokens whose logprobs this step's prefill chunk brings, and the number of
        alternatives. Only sequences that ask for prompt logprobs have an entry, and only if the chunk brings any."""
        table, found = self._table, {}
        for row in table.scored[slots].nonzero()[0].tolist():
            slot, first = slots[row], position[row] + 1
            last = min(end[row] + 1, table.prompt_len[slot])
            if row >= decodes and first < last:
                found[row] = PromptScores(table.token[slot, first:last].copy(), int(table.scored[slot]) - 1)
        return found

    def _controls(self, slots: Int32) -> dict[int, LogitsState]:
        """Return, by row, the logits processor states of those sequences that have one."""
        rows = self._table.controlled[slots].nonzero()[0].tolist()
        found = ((row, self._table.controls[slots[row]]) for row in rows)
        return {row: each for row, each in found if each is not None}

    def _constraints(self, slots: Int32) -> dict[int, RowConstraint]:
        """Return, by row, the grammars of those sequences that have one."""
        rows = self._table.constrained[slots].nonzero()[0].tolist()
        found = ((row, self._table.constraints[slots[row]]) for row in rows)
        return {row: each for row, each in found if each is not None}

    def _tokens(self, slots: Int32, position: Int32, end: Int32, decodes: int, rows: int) -> Int64:
        """Return the token ids of a step, all rows in one array. The first `rows` belong to decoding sequences and are
        0, since the device fills them in; the token ids of prefill chunks follow."""
        chunks = zip(slots[decodes:].tolist(), position[decodes:].tolist(), end[decodes:].tolist(), strict=True)
        known = [self._table.token[slot, first:last] for slot, first, last in chunks]
        return np.concatenate([np.zeros(rows, np.int64), *known])

    def _blocked_ids(self, fixed: _Fixed, sample: Bool, end: Int32) -> dict[int, Int32]:
        """Return row -> ids that may not be sampled: the stop ids of rows whose sampled token comes before min_tokens.
        `end` has the position of that token."""
        if not fixed.early:
            return {}
        early = sample & (end < fixed.min_len)
        if not early.any():
            return {}
        table, slots = self._table, fixed.slot
        rows = (early & (table.num_stop[slots] > 0)).nonzero()[0]
        return {int(row): table.stop_id[slots[row], : table.num_stop[slots[row]]].copy() for row in rows}


@dataclass(frozen=True, slots=True)
class _Fixed:
    """The columns, fixed at their starts, of the slots that ran last."""

    version: int
    slot: Int32
    everyone: Bool
    prefill_len: Int32
    prefill_only: Bool
    bound: Int32
    min_len: Int32
    early: bool
    """Whether a sequence had not reached its min_len."""
    controls: dict[int, LogitsState]
    constraints: dict[int, RowConstraint]
    columns: dict[str, Any]


def select_sequences(batch: StepBatch, keep: list[int]) -> StepBatch:
    """Return the part of a step that concerns the sequences with the indices `keep`, renumbered from 0, for a Runner.
    Columns that only a device reads are left out."""
    first = np.concatenate([[0], batch.count.cumsum()])
    columns = {
        field.name: getattr(batch, field.name)[keep]
        for field in dataclasses.fields(batch)
        if field.name not in _NOT_SELECTED
    }
    token = np.concatenate([batch.token[first[s] : first[s + 1]] for s in keep])
    blocked = {new: batch.blocked[old] for new, old in enumerate(keep) if old in batch.blocked}
    controls = {new: batch.controls[old] for new, old in enumerate(keep) if old in batch.controls}
    constraints = {new: batch.constraints[old] for new, old in enumerate(keep) if old in batch.constraints}
    scores = {new: batch.scores[old] for new, old in enumerate(keep) if old in batch.scores}
    return StepBatch(
        token=token,
        blocked=blocked,
        controls=controls,
        constraints=constraints,
        scores=scores,
        drafts=batch.drafts[keep] if len(batch.drafts) else batch.drafts,
        formed_ns=batch.formed_ns,
        **columns,
    )
