"""A buffer that steps are packed into holds what a fresh one would, however little of it was written again; but for how
keys are shared out, which may be as it was."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from unittest import mock

import numpy as np
import pytest

from quire_worker.arrays import Int32
from quire_worker.cuda.step_columns import StepColumns
from quire_worker.cuda.step_layout import StepLayout, Tiling
from quire_worker.cuda.step_size import StepSize
from quire_worker.ops.triton.kv_splits import COLUMNS, NARROW
from quire_worker.sampling.param_rows import param_rows
from quire_worker.step import StepBatch
from tests.kernels.ops.kv_split_rig import check_shares

TILING = Tiling(8, 6)
WORDS = 4096


def decoding(rng: np.random.Generator, rows: int) -> StepBatch:
    """A step of sequences that decode, as StepBuilder makes them."""
    everyone = np.ones(rows, np.bool_)
    return StepBatch(
        token=np.zeros(rows, np.int64),
        count=np.ones(rows, np.int32),
        position=rng.integers(0, 90, rows).astype(np.int32),
        page_table=rng.integers(1, 99, (rows, 6)).astype(np.int32),
        sample=everyone,
        params=param_rows(
            rows,
            temperature=rng.random(rows),
            top_k=rng.integers(0, 9, rows),
            top_p=rng.random(rows),
            min_p=rng.random(rows),
            seed=rng.integers(0, 2**64, rows, dtype=np.uint64),
            sample_index=rng.integers(0, 9, rows),
        ),
        logprobs=np.full(rows, -1, np.int32),
        slot=rng.permutation(20)[:rows].astype(np.int32),
        fed=everyone,
        last=np.zeros(rows, np.bool_),
        stop_id=rng.integers(0, 97, (rows, 2)).astype(np.int32),
    )


def following(rng: np.random.Generator, batch: StepBatch, steps: int) -> Iterator[StepBatch]:
    """Its next steps: kept arrays are the same, others are new, and the longest comes into another page."""
    for _ in range(steps):
        position = batch.position + 1
        width = -(-int(position.max() + 1) // 16)
        table = rng.integers(1, 99, (len(position), width)).astype(np.int32)
        last = rng.random(len(position)) < 0.3
        batch = dataclasses.replace(batch, position=position, page_table=table, last=last)
        yield batch


def check(columns: StepColumns, layout: StepLayout, batch: StepBatch, control: dict[int, int]) -> None:
    wanted: Int32 = columns.words.copy()
    used = layout.pack(batch, wanted, control)
    assert columns.pack(layout, batch, control) == used
    found = columns.words.copy()
    if "split" in layout.place:
        begin, length = layout.place["split"]
        lengths = batch.position[: int(np.count_nonzero(batch.fed))] + 1
        check_shares(found[begin : begin + length].reshape(COLUMNS, -1), lengths.tolist(), NARROW)
        found[begin : begin + length] = wanted[begin : begin + length]
    assert found[:used].tolist() == wanted[:used].tolist()


def mixed(batch: StepBatch) -> StepBatch:
    """The same sequences, the last of which computes three tokens of its prompt."""
    count = batch.count.copy()
    count[-1] = 3
    fed = np.arange(len(count)) < len(count) - 1
    return dataclasses.replace(batch, count=count, fed=fed, token=np.zeros(int(count.sum()), np.int64))


@pytest.mark.parametrize("even", [False, True])
def test_it_holds_what_a_fresh_one_would(even: bool) -> None:
    rng = np.random.default_rng(5)
    layout = StepLayout.of(StepSize(7, 9, 2, filtered=True), TILING._replace(even=even))
    columns = StepColumns(np.full(WORDS, 12345, np.int32))
    first, other = decoding(rng, 5), decoding(rng, 7)
    steps = [first, *following(rng, first, 20), mixed(first), first, *following(rng, first, 2)]
    steps += [other, *following(rng, other, 3), dataclasses.replace(other, blocked={1: np.array([3], np.int32)}), other]
    with mock.patch.object(StepLayout, "pack_next", autospec=True, side_effect=StepLayout.pack_next) as short:
        for step in steps:
            check(columns, layout, step, {})
    assert short.call_count == (0 if even else 20 + 2 + 3)


def test_another_layout_is_written_whole() -> None:
    rng = np.random.default_rng(6)
    batch = decoding(rng, 4)
    columns = StepColumns(np.full(WORDS, 12345, np.int32))
    controlled = StepLayout.of(StepSize(4, controlled=True), TILING)
    for layout in (StepLayout.of(StepSize(4), TILING), StepLayout.of(StepSize(6), TILING), controlled):
        check(columns, layout, batch, {2: 77} if layout is controlled else {})
    check(columns, controlled, batch, {3: 99})
