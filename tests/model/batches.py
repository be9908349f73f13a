"""Builds steps for the model runner by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from quire_common.sequence import Sampling
from quire_worker.arrays import Int32
from quire_worker.matcher.row_constraint import RowConstraint
from quire_worker.sampling.logits_state import LogitsState
from quire_worker.sampling.param_rows import rows_of
from quire_worker.step import StepBatch

PAGE_SIZE = 16


@dataclass
class Run:
    """What one sequence does in a step."""

    token: Sequence[int]
    position: int
    pages: Sequence[int]
    sample: bool = True
    sampling: Sampling = field(default_factory=Sampling)
    logprobs: int = -1
    blocked: Sequence[int] = field(default_factory=tuple)
    controls: LogitsState | None = None
    constraint: RowConstraint | None = None


def make_batch(runs: Sequence[Run]) -> StepBatch:
    width = max(len(run.pages) for run in runs)
    table: Int32 = np.zeros((len(runs), width), np.int32)
    for row, run in enumerate(runs):
        table[row, : len(run.pages)] = run.pages
    return StepBatch(
        token=np.concatenate([np.asarray(run.token, np.int64) for run in runs]),
        count=np.array([len(run.token) for run in runs], np.int32),
        position=np.array([run.position for run in runs], np.int32),
        page_table=table,
        sample=np.array([run.sample for run in runs]),
        params=rows_of(run.sampling for run in runs),
        logprobs=np.array([run.logprobs for run in runs], np.int32),
        blocked={row: np.array(run.blocked, np.int32) for row, run in enumerate(runs) if len(run.blocked)},
        controls={row: run.controls for row, run in enumerate(runs) if run.controls is not None},
        constraints={row: run.constraint for row, run in enumerate(runs) if run.constraint is not None},
    )


def pages_for(tokens: int, first: int) -> list[int]:
    """Consecutive pages, backwards, so that nothing relies on their order in the pool."""
    return list(range(first, first + -(-tokens // PAGE_SIZE)))[::-1]
