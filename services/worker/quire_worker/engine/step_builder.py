"""From the batch rule's choice to a StepBatch: gathers the columns of the slots that run."""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING

import numpy as np

from quire_worker.step import StepBatch

if TYPE_CHECKING:
    from quire_worker.engine.batch_rule import Choice
    from quire_worker.engine.slots import SlotTable
    from quire_worker.step import Bool, Int32

# The device's own columns, and those that are not by sequence.
_NOT_SELECTED = ("token", "blocked", "formed_ns", "slot", "fed", "last", "stop_id")


def build_step(table: SlotTable, choice: Choice) -> StepBatch:
    """The device's input. Arrays are copies: the table may change while the step runs."""
    slots, count = choice.slot, choice.count
    position = table.computed[slots]
    end = position + count
    chunks = [
        table.token[slot, first:last]
        for slot, first, last in zip(
            slots[choice.decodes :].tolist(),
            position[choice.decodes :].tolist(),
            end[choice.decodes :].tolist(),
            strict=True,
        )
    ]
    sample = (end >= table.prefill_len[slots]) & ~table.prefill_only[slots]
    width = -(-int(end.max()) // table.page_size)
    return StepBatch(
        token=np.concatenate([np.zeros(choice.decodes, np.int64), *chunks]),
        count=count,
        position=position,
        page_table=_covering_pages(table, slots, end, width),
        sample=sample,
        temperature=table.temperature[slots],
        top_k=table.top_k[slots],
        top_p=table.top_p[slots],
        min_p=table.min_p[slots],
        seed=table.seed[slots],
        sample_index=table.sample_index[slots],
        logprobs=table.logprobs[slots],
        blocked=_blocked_ids(table, slots, sample, end),
        formed_ns=time.monotonic_ns(),
        slot=slots,
        fed=np.arange(len(slots)) < choice.decodes,
        last=end >= table.bound[slots],
        stop_id=table.stop_id[slots, : int(table.num_stop[slots].max())],
    )


def select_sequences(batch: StepBatch, keep: list[int]) -> StepBatch:
    """The step of some of its sequences, for the Runner alone."""
    first = np.concatenate([[0], np.cumsum(batch.count)])
    columns = {
        field.name: getattr(batch, field.name)[keep]
        for field in dataclasses.fields(batch)
        if field.name not in _NOT_SELECTED
    }
    token = np.concatenate([batch.token[first[s] : first[s + 1]] for s in keep])
    blocked = {new: batch.blocked[old] for new, old in enumerate(keep) if old in batch.blocked}
    return StepBatch(token=token, blocked=blocked, formed_ns=batch.formed_ns, **columns)


def _covering_pages(table: SlotTable, slots: Int32, end: Int32, width: int) -> Int32:
    """Tables cut to what each sequence needs: pages granted ahead are not the runner's business."""
    pages = table.page_table[slots, :width]
    needed = -(-end // table.page_size)
    return np.where(np.arange(width)[None, :] < needed[:, None], pages, 0).astype(np.int32)


def _blocked_ids(table: SlotTable, slots: Int32, sample: Bool, end: Int32) -> dict[int, Int32]:
    """Row -> ids that may not be drawn: stop ids of rows that have not reached min_tokens."""
    rows = np.flatnonzero(sample & (end < table.min_len[slots]) & (table.num_stop[slots] > 0))
    return {int(row): table.stop_id[slots[row], : table.num_stop[slots[row]]].copy() for row in rows}
