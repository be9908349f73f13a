"""PacedRunner: a Runner whose steps take a given time and whose tokens depend on the whole prefix, through the pages.

See `hashing` for the model and `answer` for its pure form. What is written at a position is read again from the page
that the step's table names, so tokens tell of every mistake in paging and in what was fed back. Limits on which tokens
may be drawn change nothing here: there are no logits. Logit controls forbid tokens that they would make less likely.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from quire_common.credit import LogprobColumns
from quire_worker.paced.answer import forbidden
from quire_worker.paced.faults import StepFaults
from quire_worker.paced.hashing import contributions, draws, keys, probes, redraw, tokens_of
from quire_worker.paced.pacer import Pacer
from quire_worker.step import DeviceTiming, StepOutput

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from quire_worker.arrays import Int32, Int64, UInt64
    from quire_worker.paced.page_array import PageArray
    from quire_worker.step import StepBatch

    IntP = NDArray[np.intp]

DAMAGED = -1
NO_FAULTS = StepFaults()


class PacedRunner:
    """`step_ms` for every step, and `prefill_us_per_token` more for each prompt token in it; 0 and 0 take no time."""

    def __init__(
        self,
        pages: PageArray,
        vocab_size: int,
        step_ms: float = 0.0,
        prefill_us_per_token: float = 0.0,
        pacer: Pacer | None = None,
        faults: StepFaults = NO_FAULTS,
    ) -> None:
        self.pages = pages
        self._vocab_size = vocab_size
        self._step_ns = round(step_ms * 1e6)
        self._prefill_ns = round(prefill_us_per_token * 1e3)
        self._pacer = Pacer() if pacer is None else pacer
        self._faults = faults
        self.steps = 0

    def run(self, batch: StepBatch) -> StepOutput:
        """Carry out this step's faults, compute its tokens at once, and then wait until the step's planned end."""
        began = time.perf_counter_ns()
        self.steps += 1
        effect = self._faults.strike(self.steps)
        token, logprobs = self._compute(batch)
        computed = time.perf_counter_ns()
        step_ns = self._step_ns
        if self._prefill_ns:
            step_ns += self._prefill_ns * int(batch.count[batch.count > 1].sum())
        if effect is not None:
            step_ns += round(effect.extra_ms * 1e6)
            if effect.damaged:
                token[:1] = DAMAGED
        if step_ns:
            self._pacer.wait_until(self._pacer.end_of_step(batch.formed_ns, step_ns))
        ended = time.perf_counter_ns()
        return StepOutput(token, logprobs, DeviceTiming((computed - began) // 1000, (ended - computed) // 1000, 0))

    def _compute(self, batch: StepBatch) -> tuple[Int32, LogprobColumns | None]:
        """Write the KV of all rows, and draw a token for each sequence that samples; returns the tokens, and the
        logprobs of those who asked, if any."""
        last = self._advance(batch)
        if batch.sample.all():
            sampled = np.arange(len(batch.count))
        else:
            sampled = np.flatnonzero(batch.sample)
            last = last[sampled]
        length = (batch.position[sampled] + batch.count[sampled]).astype(np.int64)
        probe = self.pages.states[self._places(batch.page_table, sampled, probes(last, length))]
        asked = batch.draws.take(sampled)
        key = keys(asked["temperature"], asked["seed"], asked["sample_index"])
        x = draws(last, probe, length, key)
        token = tokens_of(x, self._vocab_size)
        if batch.blocked or batch.controls:
            for row in np.flatnonzero(np.isin(sampled, [*batch.blocked, *batch.controls])).tolist():
                sequence = int(sampled[row])
                controls = batch.controls.get(sequence)
                blocked = forbidden(controls, self._vocab_size, batch.blocked.get(sequence, ()))
                if blocked[token[row]]:
                    x[row], token[row] = redraw(int(x[row]), blocked)
                if controls is not None and controls.failure is not None:
                    token[row] = DAMAGED
        return token, _logprobs(x, token, batch.logprobs[sampled], self._vocab_size)

    def _advance(self, batch: StepBatch) -> UInt64:
        """Write the KV of all rows to the pool; returns the KV of each sequence's last row."""
        first_place = batch.position.astype(np.int64)
        sequences: IntP = np.arange(len(first_place))
        before = self._before(batch.page_table, sequences, first_place)
        if len(batch.token) == len(sequences):
            state = contributions(batch.token, first_place)
            state += before
            self.pages.states[self._places(batch.page_table, sequences, first_place)] = state
            return state
        end = np.cumsum(batch.count)
        first = end - batch.count
        owner = np.repeat(sequences, batch.count)
        place = np.arange(len(owner)) + (first_place - first)[owner]
        total = np.cumsum(contributions(batch.token, place), dtype=np.uint64)
        before[1:] -= total[first[1:] - 1]
        total += before[owner]
        self.pages.states[self._places(batch.page_table, owner, place)] = total
        return total[end - 1]

    def _before(self, table: Int32, sequences: IntP, place: Int64) -> UInt64:
        """The KV of the position before each `place`; 0 at a sequence's start."""
        before = self.pages.states[self._places(table, sequences, np.maximum(place - 1, 0))]
        before[place == 0] = 0
        return before

    def _places(self, table: Int32, sequences: IntP, place: Int64) -> Int64:
        """Look up positions of sequences in their page tables; returns their indices into the pool."""
        size = self.pages.page_size
        page = place // size
        return table[sequences, page] * size + (place - page * size)


def _logprobs(x: UInt64, token: Int32, asked: Int32, vocab_size: int) -> LogprobColumns | None:
    """Make up logprobs for the tokens whose sequences ask for them (`asked` >= 0); None if none does. The same x gives
    the same logprobs: the chosen token is the likeliest, and each next id is one nat less likely."""
    index = np.flatnonzero(asked >= 0).astype(np.int32)
    if not len(index):
        return None
    logprob = -((x[index] & np.uint64(0xFFFF)).astype(np.float32) / np.float32(1 << 14))
    count = np.minimum(asked[index], vocab_size).astype(np.int32)
    owner = np.repeat(np.arange(len(index)), count)
    nth = np.arange(len(owner)) - (np.cumsum(count) - count)[owner]
    return LogprobColumns(
        token_index=index,
        logprob=logprob,
        rank=np.ones(len(index), np.int32),
        top_count=count,
        top_id=((token[index][owner] + nth) % vocab_size).astype(np.int32),
        top_logprob=(logprob[owner] - nth).astype(np.float32),
    )
