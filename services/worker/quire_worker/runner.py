"""Runs one step: pads and plans the batch, calls the decoder, and samples. The engine calls it once per step, from one
thread.

This module knows nothing of slots, grants or stop conditions. `step` describes its input and output.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire_common.credit import LogprobColumns
from quire_common.credit.logprobs import join_logprobs
from quire_worker.arrays import Int64
from quire_worker.kv.page_pool import PagePool, pages_to_zero
from quire_worker.matcher.step_masks import StepMasks, fetch_masks
from quire_worker.model.step_decoder import StepDecoder
from quire_worker.sampling.columns import SamplingColumns
from quire_worker.sampling.token_mask import TokenMask
from quire_worker.step import HELD, DeviceTiming, StepBatch, StepOutput, StepSamples, samples_of


class ModelRunner:
    """A decoder and its page pool."""

    def __init__(self, decoder: StepDecoder[Any], pool: PagePool) -> None:
        # Any, because the type of a plan is private to the implementation of the ops.
        self.decoder = decoder
        self.pool = pool

    @torch.inference_mode()
    def run(self, batch: StepBatch) -> StepOutput:
        """Run the layers, write all rows' keys and values, and sample a token for each sequence with `sample`, and one
        for each of its drafts. Masks of grammars are fetched just before; a sequence without its first mask is reported
        as held, so that its tokens are void, and the sample of a draft without its mask is HELD. Logprobs and prompt
        scores are computed if asked for."""
        begin = time.perf_counter_ns()
        samples = samples_of(batch)
        # A recorded pass, if there is one, has all rows: its replay saves more than fewer rows would.
        large = batch.token.size > max(self.decoder.ops.max_recorded_rows, 2 * samples.row.size)
        only_sampled = large and not batch.scores
        hidden, prepared = self._forward(batch, self._index(samples.row) if only_sampled else None)
        scores = self._scores(hidden, batch) if batch.scores else {}
        fetched = StepMasks({})
        if samples.sequence.size == 0:
            token, logprobs, forwarded = np.empty(0, np.int32), None, time.perf_counter_ns()
        else:
            logits = self._logits(hidden, None if only_sampled else samples.row)[: samples.row.size]
            forwarded = time.perf_counter_ns()
            fetched = fetch_masks(batch, samples)
            token = self.decoder.ops.sample(logits, _columns(batch, samples, fetched.masks))
            logprobs = self.decoder.ops.logprobs(logits, token, batch.logprobs[samples.sequence])
            token[list(fetched.missing)] = HELD
        timing = DeviceTiming(
            prepare_us=(prepared - begin) // 1000,
            forward_us=(forwarded - prepared) // 1000,
            sample_us=(time.perf_counter_ns() - forwarded) // 1000,
        )
        return StepOutput(token, logprobs, timing, scores, fetched.held)

    @torch.inference_mode()
    def all_logits(self, batch: StepBatch) -> Tensor:
        """Run a step, which writes keys and values, and return the logits [R, V] of every row. For tests."""
        hidden, _ = self._forward(batch)
        return self._logits(hidden, None)[: batch.token.size]

    def _forward(self, batch: StepBatch, output_rows: Tensor | None = None) -> tuple[Tensor, int]:
        """Zero the pages that the step begins and does not fill, pad the rows, and run the decoder's layers. Returns
        the hidden rows, those of `output_rows` or else all, padding included, and the `perf_counter_ns` at which
        preparation ended."""
        ops = self.decoder.ops
        rows = _padded(batch.token.size, ops.row_multiple)
        token = torch.zeros(rows, dtype=torch.int64)
        token[: batch.token.size] = torch.from_numpy(batch.token)
        self.pool.zero_pages(pages_to_zero(batch.position, batch.count, batch.page_table, self.pool.page_size))
        plan = ops.plan(self.pool.tensor, rows, batch.position, batch.count, batch.page_table)
        prepared = time.perf_counter_ns()
        return self.decoder.forward(token, self.pool.tensor, plan, output_rows=output_rows), prepared

    def _scores(self, hidden: Tensor, batch: StepBatch) -> dict[int, LogprobColumns]:
        """Return, by sequence, the logprobs of prompt tokens that `batch.scores` asks for. Only _SCORED_ROWS rows have
        logits at a time, because each row of logits is as long as the vocabulary. Raises Internal NAN_LOGITS if a
        row's largest logit is NaN or infinite."""
        first_row = np.cumsum(batch.count, dtype=np.int64) - batch.count
        found = {}
        for sequence, scores in batch.scores.items():
            parts = []
            for begin in range(0, scores.token.size, _SCORED_ROWS):
                token = scores.token[begin : begin + _SCORED_ROWS]
                rows = first_row[sequence] + np.arange(begin, begin + token.size)
                logits = self._logits(hidden, rows)[: token.size]
                wanted = np.full(token.size, scores.wanted, np.int32)
                part = self.decoder.ops.logprobs(logits, token, wanted)
                if part is not None:
                    parts.append(part)
            if (joined := join_logprobs((0, part) for part in parts)) is not None:
                found[sequence] = joined.numbered()
        return found

    def _logits(self, hidden: Tensor, rows: Int64 | None) -> Tensor:
        """Compute the logits of the given rows, at least one, or of all hidden rows; padding is not cut off."""
        return self.decoder.logits(hidden if rows is None else hidden.index_select(0, self._index(rows)))

    def _index(self, rows: Int64) -> Tensor:
        """Return the rows as an index, padded to a multiple of the ops' row multiple. Padding repeats the first row.
        Without rows, the index names row 0."""
        index = np.zeros(_padded(max(1, rows.size), self.decoder.ops.row_multiple), np.int64)
        index += rows[0] if rows.size else 0
        index[: rows.size] = rows
        return torch.from_numpy(index)


# The number of prompt rows that have logits at the same time.
_SCORED_ROWS = 64


def _padded(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def _columns(batch: StepBatch, samples: StepSamples, masks: Mapping[int, TokenMask]) -> SamplingColumns:
    """Return the sampling columns: parameters and positions of each sample, and blocked ids and controls by the row of
    a sequence's first sample. `masks` are by row already."""
    place: dict[int, int] = {}
    if batch.blocked or batch.controls:
        place = {int(samples.sequence[row]): row for row in np.flatnonzero(samples.nth == 0).tolist()}
    return SamplingColumns(
        params=batch.params.take(samples.sequence),
        position=samples.sample_position,
        blocked={place[sequence]: ids for sequence, ids in batch.blocked.items() if sequence in place},
        controls={place[sequence]: each for sequence, each in batch.controls.items() if sequence in place},
        masks=masks,
    )
