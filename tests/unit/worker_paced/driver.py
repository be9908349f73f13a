"""Drives a PacedRunner by hand: sequences on pages of their own, in whatever company and chunks a test chooses."""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from dataclasses import dataclass

import numpy as np

from quire_common.sequence import Sampling
from quire_worker.paced.pacer import Pacer
from quire_worker.paced.page_array import PageArray
from quire_worker.paced.runner import PacedRunner
from quire_worker.sampling.param_rows import rows_of
from quire_worker.step import StepBatch, StepOutput

PAGE_SIZE = 4
VOCAB = 997
GREEDY = Sampling()


def a_runner(step_ms: float = 0.0, prefill_us_per_token: float = 0.0, pacer: Pacer | None = None) -> PacedRunner:
    return PacedRunner(PageArray(200, PAGE_SIZE), VOCAB, step_ms, prefill_us_per_token, pacer)


@dataclass
class Row:
    """A sequence on its pages."""

    tokens: list[int]
    pages: list[int]
    sampling: Sampling = GREEDY
    computed: int = 0
    blocked: tuple[int, ...] = ()


def batch_of(rows: Ordered[Row], counts: Ordered[int], formed_ns: int = 0) -> StepBatch:
    """A step over these rows, so many positions each."""
    ends = [row.computed + count for row, count in zip(rows, counts, strict=True)]
    width = -(-max(ends) // PAGE_SIZE)
    table = np.zeros((len(rows), width), np.int32)
    for index, (row, end) in enumerate(zip(rows, ends, strict=True)):
        needed = -(-end // PAGE_SIZE)
        table[index, :needed] = row.pages[:needed]
    return StepBatch(
        token=np.array(
            [t for row, end in zip(rows, ends, strict=True) for t in row.tokens[row.computed : end]], np.int64
        ),
        count=np.array(counts, np.int32),
        position=np.array([row.computed for row in rows], np.int32),
        page_table=table,
        sample=np.array([end == len(row.tokens) for row, end in zip(rows, ends, strict=True)]),
        params=rows_of(row.sampling for row in rows),
        logprobs=np.array([row.sampling.logprobs for row in rows], np.int32),
        blocked={index: np.array(row.blocked, np.int32) for index, row in enumerate(rows) if row.blocked},
        formed_ns=formed_ns,
    )


def step(runner: PacedRunner, rows: Ordered[Row], counts: Ordered[int]) -> StepOutput:
    """Run a step and append what was drawn."""
    batch = batch_of(rows, counts)
    output = runner.run(batch)
    drawn = iter(output.token.tolist())
    for row, count, sampled in zip(rows, counts, batch.sample.tolist(), strict=True):
        row.computed += count
        if sampled:
            row.tokens.append(next(drawn))
    return output


def finish(runner: PacedRunner, row: Row, count: int, chunk: int = 1000) -> list[int]:
    """Prefill in chunks, then decode alone until `count` tokens were drawn."""
    prompt = len(row.tokens)
    while len(row.tokens) < prompt + count:
        step(runner, [row], [min(chunk, len(row.tokens) - row.computed)])
    return row.tokens[prompt:]
