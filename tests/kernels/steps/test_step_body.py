"""A whole step on the device against the CPU's: packed, padded, fed back, sampled, stopped; decoding and mixed."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from quire_worker.cuda.logits_states import LogitsStates
from quire_worker.cuda.step_layout import StepLayout, Tiling
from quire_worker.cuda.step_size import StepSize, decode_sizes, fine_sizes, graph_sizes
from quire_worker.engine.step_runner import StepRunner
from quire_worker.model.feed_forwards import DenseFeedForward
from quire_worker.ops.triton import fresh_attention, triton_ops
from quire_worker.ops.triton.fresh_attention import Fresh, FreshPlans
from tests.kernels.steps.stepping import DEVICE, ON_GPU, WIDTH, WORDS, Sequences, TwoModels, least_that_suits
from tests.tiers import deep_after

# The interpreter computes with numpy, which tells of exp(-inf - most) and the like.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning")


_MANY = 12


# The interpreter takes seconds for a step.
@pytest.mark.parametrize("family", ["llama-32", "qwen3"] if ON_GPU else ["qwen3"])
@pytest.mark.parametrize("even", deep_after(1, [False, True]))
def test_steps_come_to_what_the_cpu_says(
    family: str, even: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = TwoModels(tmp_path / "model", family, even=even)
    shape, spec = models.shape, models.cpu.spec
    reference = StepRunner(models.cpu.runner)
    monkeypatch.setattr(fresh_attention, "PIECE", 8)
    # Some steps have many rows, whose products are added to the residual at once, and others few.
    monkeypatch.setattr(triton_ops, "_MANY_ROWS", _MANY)
    suited = FreshPlans.suit(shape, spec.sees_all) and not even
    body = models.body()
    sequences = Sequences(3, spec.vocab_size, models.page_size)
    states = LogitsStates(DEVICE, spec.vocab_size)
    mixed = controlled = whole = narrowed = 0
    many = set()
    computed, run = list[int](), DenseFeedForward.run

    def recorded(self: DenseFeedForward[Any], ops: Any, x: Tensor, onto: Tensor | None) -> Tensor | None:
        computed.append(len(x))
        return run(self, ops, x, onto)

    monkeypatch.setattr(DenseFeedForward, "run", recorded)
    for turn in range(60 if ON_GPU else 6):
        batch = sequences.batch()
        if max(sequences.done) >= WIDTH * models.page_size - 1:
            break
        # The reference writes what is fed into `token`, and tells the controls of it.
        wanted = reference.run(dataclasses.replace(batch, token=batch.token.copy()))
        decodes = int(batch.fed.sum())
        chunks = len(batch.count) - decodes
        mixed += bool(decodes and chunks)
        size = StepSize(
            decodes + 2,
            (len(batch.token) - decodes + 5) if chunks else 0,
            chunks + 1 if chunks else 0,
            True,
            bool(batch.controls),
        )
        controlled += bool(batch.controls)
        first = np.cumsum(batch.count) - batch.count
        fresh = tuple(
            Fresh(int(first[each]) - decodes, int(batch.count[each]))
            for each in np.flatnonzero((batch.position == 0) & (batch.count > 3))
            if suited and turn % 2
        )
        whole += len(fresh)
        rows = max([size.rows, *(chunk.row + chunk.padded for chunk in fresh)])
        layout = StepLayout.of(dataclasses.replace(size, rows=rows), Tiling.of(shape, DEVICE, even=even))
        layout = layout.leaving(fresh, chunks) if fresh else layout
        host = np.full(WORDS, 12345, np.int32)
        used = layout.pack(batch, host, states.addresses(batch))
        body.uploaded[:used].copy_(torch.from_numpy(host[:used]))
        body.launch(layout)
        last_rows, all_rows = layout.size.sequences, layout.size.total_rows
        assert computed[-1] == (last_rows if 2 * last_rows <= all_rows else all_rows), "rows of the last layer"
        narrowed += computed[-1] < computed[-2]
        many.add(layout.size.total_rows >= _MANY)
        places = np.arange(len(batch.count))
        places[decodes:] += 2
        token = body.results[: size.sequences].cpu().numpy()[places]
        finish = body.results[size.sequences : 2 * size.sequences].cpu().numpy()[places]
        drawn = batch.sample
        assert token[drawn].tolist() == wanted.token[drawn, 0].tolist()
        assert (token[~drawn] == -1).all()
        assert finish[drawn].tolist() == wanted.finish[drawn].tolist()
    assert mixed >= 1 and controlled >= 2 and narrowed >= 2
    assert bool(whole) == suited and many == {False, True}


def test_sizes() -> None:
    assert decode_sizes(40) == [1, 2, 4, 8, 16, 24, 32, 40]
    assert decode_sizes(400)[-3:] == [320, 384, 400]
    assert decode_sizes(512)[-3:] == [320, 384, 512], "448 rows are slower than 512"
    assert decode_sizes(800)[-4:] == [512, 640, 768, 800]
    sizes = graph_sizes(256, 2048)
    assert sizes[0] == StepSize(1) and len(sizes) == len(set(sizes))
    assert least_that_suits(sizes, StepSize(5)) == StepSize(8)
    assert least_that_suits(sizes, StepSize(5, filtered=True)) == StepSize(8, filtered=True)
    assert least_that_suits(sizes, StepSize(5, controlled=True)) == StepSize(8, filtered=True, controlled=True)
    advance = [size for size in sizes if size.in_advance and size.controlled]
    assert advance == [StepSize(1, filtered=True, controlled=True)]
    assert least_that_suits(sizes, StepSize(3, 100, 2)) == StepSize(16, 128, 64)
    assert least_that_suits(sizes, StepSize(3, 5000, 2)) is None


def test_fine_sizes_lie_between_the_others() -> None:
    coarse, fine = graph_sizes(256, 8192), fine_sizes(256, 8192)
    assert len(fine) == len(set(fine)) and not {*coarse} & {*fine} and fine[0] == StepSize(0, 64, 64, filtered=True)
    for rows in range(1, 4097, 13):
        found = least_that_suits([*coarse, *fine], StepSize(0, rows, 1))
        assert found is not None
        assert found.rows - rows < (64 if rows <= 512 else 128 if rows <= 2048 else 256), rows
        assert found.rows <= (coarse_size := least_that_suits(coarse, StepSize(0, rows, 1)) or found).rows, coarse_size
    assert least_that_suits([*coarse, *fine], StepSize(3, 2500, 2)) == StepSize(16, 2560, 64, filtered=True)
    assert least_that_suits([*coarse, *fine], StepSize(20, 300, 1)) == StepSize(32, 320, 64, filtered=True)
    assert least_that_suits([*coarse, *fine], StepSize(70, 768, 1)) == StepSize(96, 768, 64, filtered=True)
    assert max(size.rows for size in fine_sizes(4, 1000)) == 896 and {size.decodes for size in fine_sizes(4, 1000)} == {
        0,
        4,
    }


def test_full_steps_have_graphs_that_waste_little() -> None:
    sizes = graph_sizes(512, 8192)
    assert sizes[0] == StepSize(1) and len(sizes) == len(set(sizes))
    for decodes in range(0, 513, 7):
        step = StepSize(decodes, 8192 - decodes, 20)
        found = least_that_suits(sizes, step)
        assert found is not None and found.total_rows <= 1.02 * 8192, step
        assert found.rows <= 8192 and found.holds(step)
    assert least_that_suits(sizes, StepSize(0, 7800, 20)) == StepSize(0, 8192, 128)
    assert least_that_suits(sizes, StepSize(0, 7000, 20)) is None
    assert least_that_suits(sizes, StepSize(0, 8192, 129)) is None
    assert least_that_suits(sizes, StepSize(3, 3100, 2)) == StepSize(16, 4096, 64)
    assert StepSize(0, 20, 20) in graph_sizes(4, 20) and StepSize(4, 20, 20) in graph_sizes(4, 20)
    assert StepSize(0, 3000, 64) in graph_sizes(256, 3000)
