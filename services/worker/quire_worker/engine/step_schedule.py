"""The batch rule: which slots run in the next step, and how many positions of each. `schedule_step` is a pure,
deterministic function of the slots' columns; StepScheduler applies it to a SlotTable.

First, each decodable slot gets one token, lowest order key first, up to `max_num_seqs`. Then prefill chunks follow in
the scheduler's order, as far as the Grant's budget allows. Last, rows that may have drafts share the rest of the
budget's tokens evenly. No row goes past its slot's credit. A slot without credit does not run: its row goes to the
next slot. So standby slots (the started slots beyond `max_num_seqs`) prefill as the budget has room. As soon as a
decode row is free, the standby slot with the lowest order key takes it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from quire_worker.engine.slots import SlotState

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from quire_common.credit import Budget
    from quire_worker.arrays import Bool, Int32, Int64
    from quire_worker.engine.slots import SlotTable

_NO_SLOTS = np.empty(0, np.int32)
# Bytes of the prompt logprobs that a step brings: they travel in one Report, of which gRPC carries 64 MiB.
MAX_SCORE_BYTES = 16 * 1024 * 1024
# Of one token's, and of each of its alternatives.
_SCORE_BYTES, _ALTERNATIVE_BYTES = 16, 8
# Drafts cost time of the host, and gain nothing where a grammar forces no token. So after _MAX_UNFORCED_ROWS rows
# without a forced token, a slot has drafts in only one of _DRAFT_RETRY_STEPS steps.
_MAX_UNFORCED_ROWS = 16
_DRAFT_RETRY_STEPS = 8


@dataclass(frozen=True, slots=True)
class SlotView:
    """The columns that the batch rule reads, by slot."""

    runnable: Bool
    """Holds a sequence whose cached range is ready. False while it decodes and awaits its grammar's mask."""
    computed: Int32
    prefill_len: Int32
    """A slot prefills up to here; past it, it has one token to compute, sampled in its step before, run or not."""
    decoding: Bool
    """Whether the slot's last prefill chunk was launched."""
    most_drafts: Int32 | None
    """The most drafts that the slot's row may have after its token. None: no row has drafts."""
    ceiling: Int32
    """Positions that it may compute by its limit and its pages."""
    bound: Int32
    """Positions that it will ever compute: there it ends by length."""
    by_key: NDArray[np.intp]
    """Slots that hold a sequence, lowest order key first."""
    order_key: Int64
    prefill_rank: Int32
    """Place in the scheduler's prefill order; ties go to the lowest order key."""
    scored: Int32
    """1 + the number of alternatives to report for each prompt token; 0: no prompt logprobs."""


@dataclass(frozen=True, slots=True)
class StepSchedule:
    """The next step: slots and their numbers of positions. First come `decodes` decode rows, then the prefill chunks in
    order."""

    slot: Int32
    count: Int32
    decodes: int
    num_decode_tokens: int
    """The positions of the decode rows together: `decodes`, and all drafts."""


class StepScheduler:
    """Applies the batch rule to a SlotTable. While the same slots decode, one token each, their schedule is kept. The
    steps then change only the positions of these slots, so it is enough to check that none of the slots has reached the
    end of its credit or of its answer. Other changes of the columns are not seen: the caller calls `forget` before it
    applies a Grant, and after a step in which a row has sampled no token."""

    def __init__(self, table: SlotTable, max_num_seqs: int) -> None:
        self._table = table
        self._max_num_seqs = max_num_seqs
        self._kept: _KeptSchedule | None = None

    def schedule(self, budget: Budget, launched: int) -> StepSchedule:
        """Return the schedule of the next step (see `schedule_step`), after `launched` steps. Its arrays may be those
        of the step before, so nobody may write to them."""
        kept = self._kept
        if kept is not None and kept.budget is budget and self._holds(kept):
            return kept.schedule
        view = self._view(launched)
        schedule = schedule_step(view, budget, self._max_num_seqs)
        self._kept = self._to_keep(view, budget, schedule)
        return schedule

    def stalled_slots(self) -> Int32:
        """Return the slots that cannot run only for want of credit (see `stalled_slots`)."""
        kept = self._kept if self._kept is not None and self._holds(self._kept) else None
        if kept is not None and kept.stalled is not None:
            return kept.stalled
        stalled = stalled_slots(self._view(launched=0), self._max_num_seqs)  # drafts do not matter for it
        if kept is not None:
            kept.stalled = stalled
        return stalled

    def forget(self) -> None:
        """Compute the next schedule from all columns."""
        self._kept = None

    def _holds(self, kept: _KeptSchedule) -> bool:
        """Whether the batch rule would choose the kept schedule again: no slot has started, ended or become runnable,
        and none of its slots has reached the end of its credit or of its answer."""
        table = self._table
        return kept.version == table.version and bool((table.computed[kept.schedule.slot] < kept.most).all())

    def _to_keep(self, view: SlotView, budget: Budget, schedule: StepSchedule) -> _KeptSchedule | None:
        """Return the schedule as one to be kept; None if the next schedule may be another one: a slot prefills, or
        drafts or masks change from step to step."""
        if view.most_drafts is not None or self._table.any_constrained() or not schedule.decodes:
            return None
        most = np.minimum(view.ceiling, view.bound)
        if (view.runnable & ~view.decoding & (view.computed < most)).any():
            return None
        return _KeptSchedule(self._table.version, budget, schedule, most[schedule.slot])

    def _view(self, launched: int) -> SlotView:
        """Return the columns of all slots that the batch rule reads, as they are now. A decoding slot that awaits its
        grammar's mask is not runnable. A slot has drafts only once min_tokens is reached. After _MAX_UNFORCED_ROWS rows
        without a forced token, the slot has drafts in only one of _DRAFT_RETRY_STEPS steps."""
        table = self._table
        runnable, most_drafts = table.state == SlotState.RUNNING, None
        if table.any_constrained():
            runnable &= ~(table.awaits_mask & table.decoding)
        if table.may_draft():
            most_drafts = table.most_drafts * (table.known_len >= table.min_len)
            if launched % _DRAFT_RETRY_STEPS:
                most_drafts[table.unforced_rows >= _MAX_UNFORCED_ROWS] = 0
        return SlotView(
            runnable=runnable,
            computed=table.computed,
            prefill_len=table.prefill_len,
            decoding=table.decoding,
            most_drafts=most_drafts,
            ceiling=table.ceiling(),
            bound=table.bound,
            by_key=table.by_key(),
            order_key=table.order_key,
            prefill_rank=table.prefill_rank,
            scored=table.scored,
        )


@dataclass(slots=True)
class _KeptSchedule:
    """A schedule of decode rows, with what it was made from."""

    version: int
    """SlotTable.version."""
    budget: Budget
    schedule: StepSchedule
    most: Int32
    """The position up to which each of its slots may compute."""
    stalled: Int32 | None = None
    """The slots that are stalled as long as the schedule holds; None: not computed yet."""


def schedule_step(view: SlotView, budget: Budget, max_num_seqs: int) -> StepSchedule:
    """Choose the slots of the next step and the positions of each, within credit and budget. At most `max_num_seqs`
    decode rows, and no more than the budget's tokens, come first, by order key; prefill chunks follow in the
    scheduler's order, beside decode rows with at most the budget's `prefill_tokens_beside_decoders`. Tokens of the step
    left over are shared evenly as drafts among the decode rows that may have them; a remainder is not used. The
    schedule is empty if no slot can run."""
    most = np.minimum(view.ceiling, view.bound)
    able = view.runnable & (view.computed < most)
    decode = view.by_key[(able & view.decoding)[view.by_key]][: min(max_num_seqs, budget.tokens_per_step)]
    left = budget.tokens_per_step - len(decode)
    if len(decode):
        left = min(left, budget.prefill_tokens_beside_decoders)
    candidates = (able & ~view.decoding).nonzero()[0]
    slots, counts = _prefill_chunks(view, candidates, budget, left) if len(candidates) else (_NO_SLOTS, _NO_SLOTS)
    rows, num_decode_tokens = np.ones(len(decode), np.int32), len(decode)
    if view.most_drafts is not None and len(decode):
        left = budget.tokens_per_step - len(decode) - int(counts.sum())
        drafts = np.minimum(view.most_drafts[decode], most[decode] - view.computed[decode] - 1)
        if sharing := np.count_nonzero(drafts):
            rows += np.minimum(drafts, left // sharing)
            num_decode_tokens = int(rows.sum())
    if not len(candidates):
        return StepSchedule(decode.astype(np.int32), rows, len(decode), num_decode_tokens)
    return StepSchedule(
        slot=np.concatenate([decode, slots]).astype(np.int32),
        count=np.concatenate([rows, counts]),
        decodes=len(decode),
        num_decode_tokens=num_decode_tokens,
    )


def stalled_slots(view: SlotView, max_num_seqs: int) -> Int32:
    """Return the slots that cannot run only because they have computed up to their limit or the end of their pages. A
    sequence beyond the first `max_num_seqs` that decode is left out: it waits for a decode row."""
    unended = view.runnable & (view.computed < view.bound)
    stalled = unended & (view.computed >= view.ceiling)
    if not stalled.any():
        return _NO_SLOTS
    decoding = view.by_key[(unended & view.decoding)[view.by_key]]
    stalled[decoding[max_num_seqs:]] = False
    return stalled.nonzero()[0].astype(np.int32)


def _prefill_chunks(
    view: SlotView, candidates: np.ndarray[tuple[int], np.dtype[np.intp]], budget: Budget, left: int
) -> tuple[Int32, Int32]:
    """Choose prefill chunks among the candidates, in the scheduler's order, those without a rank last and by order key,
    for at most `left` tokens in all. A chunk ends at the end of the prefill, the slot's credit, the chunk cap, the last
    of these tokens, or where prompt logprobs reach MAX_SCORE_BYTES in the step. At most `partial_prefills` chunks leave
    their prefill unfinished. A candidate that would exceed this number, or for whose prompt logprobs no room is left,
    is passed over. Returns the slots and their numbers of tokens."""
    order = np.lexsort((view.order_key[candidates], view.prefill_rank[candidates]))
    slots, counts, partial, score_bytes = [], [], 0, MAX_SCORE_BYTES
    for slot in candidates[order].tolist():
        if left <= 0:
            break
        computed, whole = int(view.computed[slot]), int(view.prefill_len[slot])
        chunk = min(whole - computed, int(view.ceiling[slot]) - computed, budget.chunk_cap, left)
        scored = int(view.scored[slot])
        token_bytes = _SCORE_BYTES + _ALTERNATIVE_BYTES * scored if scored else 0
        if scored:
            chunk = min(chunk, score_bytes // token_bytes)
            if not chunk:
                continue
        if computed + chunk < whole:
            if partial == budget.partial_prefills:
                continue  # a prompt that fits whole may still go
            partial += 1
        slots.append(slot)
        counts.append(chunk)
        left -= chunk
        score_bytes -= chunk * token_bytes
    return np.array(slots, np.int32), np.array(counts, np.int32)
