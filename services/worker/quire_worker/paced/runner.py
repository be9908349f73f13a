"""PacedRunner: a Runner whose steps take a given time, and whose tokens depend on the whole prefix through the pages.

`hashing` describes the model, and `answer` computes its answers without pages. The runner reads the KV of a position
again from the page that the step's table names. So a mistake in paging or in the tokens that are fed back changes the
answer. Sampling limits such as top_p change nothing, because there are no logits. Logit controls forbid the tokens
whose logits they would lower.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from quire_common.credit import LogprobColumns
from quire_worker.matcher.step_masks import fetch_masks
from quire_worker.paced.answer import NO_IDS, forbidden
from quire_worker.paced.faults import StepFaults
from quire_worker.paced.hashing import choose, contributions, keys, probes, random_numbers, resample, tokens_of
from quire_worker.paced.pacer import Pacer
from quire_worker.step import DAMAGED, HELD, NOTHING_LEFT, DeviceTiming, StepOutput, samples_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from quire_worker.arrays import Int32, Int64, UInt64
    from quire_worker.paced.page_array import PageArray
    from quire_worker.sampling.token_mask import TokenMask
    from quire_worker.step import StepBatch, StepSamples

    IntP = NDArray[np.intp]

NO_FAULTS = StepFaults()


class _Sampled(NamedTuple):
    """The samples of a step: their places, the random numbers that decided them, and the tokens."""

    where: StepSamples
    x: UInt64
    token: Int32


class PacedRunner:
    """A step takes `step_ms`, and `prefill_us_per_token` more for each token of a sequence that computes several, not
    counting drafts. With 0 and 0, only faults make steps take time."""

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
        """Count the step, carry out its faults (`nan` makes its first sample DAMAGED), compute its tokens at once, and
        wait until its planned end. The time is that of a step, of its prompt tokens and of faults. Then fetch the masks
        of grammars and sample these rows again, as late as a real model. A sample that follows a draft and lacks its
        mask is HELD; sequences without a first mask are reported as held."""
        began = time.perf_counter_ns()
        self.steps += 1
        effect = self._faults.apply_faults(self.steps)
        samples = self._compute(batch)
        token = samples.token
        computed = time.perf_counter_ns()
        step_ns = self._step_ns
        if self._prefill_ns:
            prefilled = batch.count - batch.drafts if len(batch.drafts) else batch.count
            step_ns += self._prefill_ns * int(prefilled[prefilled > 1].sum())
        if effect is not None:
            step_ns += round(effect.extra_ms * 1e6)
            if effect.damaged:
                token[:1] = DAMAGED
        if step_ns:
            self._pacer.wait_until(self._pacer.end_of_step(batch.formed_ns, step_ns))
        fetched = fetch_masks(batch, samples.where)
        for row, mask in fetched.masks.items():
            self._resample(batch, samples, row, mask)
        ended = time.perf_counter_ns()
        timing = DeviceTiming((computed - began) // 1000, (ended - computed) // 1000, 0)
        logprobs = _logprobs(samples.x, token, batch.logprobs[samples.where.sequence], self._vocab_size)
        if fetched.missing:
            token[list(fetched.missing)] = HELD
        return StepOutput(token, logprobs, timing, held=fetched.held)

    def _compute(self, batch: StepBatch) -> _Sampled:
        """Write the KV of all rows, and sample all tokens. The first sample of a sequence without a grammar leaves out
        tokens that are blocked or that controls forbid; rows with grammars sample again by their masks later."""
        state, where = self._advance(batch), samples_of(batch)
        sampled, length = where.sequence, where.sample_position
        last = state[where.row]
        probe = self.pages.states[self._places(batch.page_table, sampled, probes(last, length))]
        asked = batch.params.take(sampled)
        key = keys(asked["temperature"], asked["seed"], asked["sample_index"])
        x = random_numbers(last, probe, length, key)
        token = tokens_of(x, self._vocab_size)
        samples = _Sampled(where, x, token)
        if batch.blocked or batch.controls:
            chosen = np.isin(sampled, [*batch.blocked, *batch.controls]) & (where.nth == 0)
            for row in np.flatnonzero(chosen).tolist():
                if int(sampled[row]) not in batch.constraints:
                    self._resample(batch, samples, row)
        return samples

    def _resample(self, batch: StepBatch, samples: _Sampled, row: int, mask: TokenMask | None = None) -> None:
        """Sample a row's token again, with a new random number, if it is blocked or its request's controls forbid it;
        with a `mask`, always choose among tokens that are not forbidden. If there are none, the token becomes 0 or,
        with a mask, NOTHING_LEFT. It becomes DAMAGED if a logits processor failed. A DAMAGED token stays."""
        sequence = int(samples.where.sequence[row])
        controls = batch.controls.get(sequence)
        if samples.token[row] == DAMAGED:
            return
        blocked = forbidden(controls, self._vocab_size, batch.blocked.get(sequence, NO_IDS), mask)
        if mask is not None:
            token = choose(int(samples.x[row]), blocked)
            samples.token[row] = NOTHING_LEFT if token < 0 else token
        elif blocked[samples.token[row]]:
            samples.x[row], samples.token[row] = resample(int(samples.x[row]), blocked)
        if controls is not None and controls.failure is not None:
            samples.token[row] = DAMAGED

    def _advance(self, batch: StepBatch) -> UInt64:
        """Write the KV (a running sum of hashes) of all rows to their pages, and return it, one item per row."""
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
        return total

    def _before(self, table: Int32, sequences: IntP, place: Int64) -> UInt64:
        """Return the KV of the position before each `place`; 0 at the start of a sequence."""
        before = self.pages.states[self._places(table, sequences, np.maximum(place - 1, 0))]
        before[place == 0] = 0
        return before

    def _places(self, table: Int32, sequences: IntP, place: Int64) -> Int64:
        """Look up positions of sequences in their page tables. Returns their indices into the pool."""
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
