"""A replay of a recorded pass has the same bits as a pass, whatever tokens, positions and pages are new."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from quire_worker.loading import LoadedModel
from quire_worker.model.decoder import Decoder
from quire_worker.ops.cpu.cpu_ops import CpuOps
from quire_worker.ops.cpu.plan import CpuPlan
from tests.model.batches import pages_for
from tests.model.folders import load_dummy_model

SIZES: dict[str, Any] = {"head_dim": 32, "hidden_size": 64, "intermediate_size": 96}
"""The kernels need no padding for these sizes. Torch pads other sizes, and such a pass is not replayed."""


class Passes:
    """Runs passes of a decoder through `capture`, and counts those that were not replays."""

    def __init__(self, model: LoadedModel, *, extra: bool = False) -> None:
        self.ran, self.extra = 0, extra
        decoder, self.pages = model.runner.decoder, model.runner.pool.tensor
        assert isinstance(decoder, Decoder)
        assert isinstance(decoder.ops, CpuOps)
        self.decoder: Decoder[CpuPlan] = decoder
        self.ops: CpuOps = decoder.ops
        self.captured = self.ops.capture(self.run)

    def run(self, token: Tensor, pages: Tensor, plan: CpuPlan) -> tuple[Tensor, Tensor | None]:
        self.ran += 1
        residual, delta = self.decoder.run_layers(token, pages, plan)
        return residual.mul_(2.0) if self.extra else residual, delta

    def step(self, rows: int, seed: int) -> tuple[Tensor, Tensor]:
        """Return hidden rows and pages of a step of one-token sequences, with `capture` and without."""
        drawn = np.random.default_rng(seed)
        position = drawn.integers(0, 100, rows).astype(np.int32)
        table = np.array([pages_for(100, 1 + 7 * row) for row in range(rows)], np.int32)
        token = torch.from_numpy(drawn.integers(0, 97, rows))
        found = []
        with torch.inference_mode():
            for run in (self.captured, self.decoder.run_layers):
                self.pages.copy_(torch.randn(self.pages.shape, generator=torch.Generator().manual_seed(seed)))
                plan = self.ops.plan(self.pages, rows, position, np.ones(rows, np.int32), table)
                residual, delta = run(token, self.pages, plan)
                assert delta is not None
                found.append(torch.cat([(residual + delta).flatten(), self.pages.flatten()]))
        return found[0], found[1]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_dummy_model(tmp_path_factory.mktemp("model"), **SIZES)


def test_replay_is_bit_identical_to_a_pass(model: LoadedModel) -> None:
    passes = Passes(model)
    passes.step(8, 0)
    passes.ran = 0  # that pass allocated the buffers, so its tape was dropped
    for turn, rows in enumerate((8, 1, 3, 8, 1, 3, 3, 8)):
        replayed, plain = passes.step(rows, turn)
        assert torch.equal(replayed, plain), turn
    assert passes.ran == 3


def test_a_replay_has_the_gate_on_attentions_output(tmp_path: Path) -> None:
    gated: dict[str, Any] = {"architectures": ["AfmoeForCausalLM"], "num_dense_layers": 2}
    passes = Passes(load_dummy_model(tmp_path, **SIZES, **gated))
    passes.step(8, 0)
    passes.ran = 0
    for turn in range(3):
        replayed, plain = passes.step(8, turn)
        assert torch.equal(replayed, plain), turn
    assert passes.ran == 1


def test_replaced_buffers_cause_a_new_recording(model: LoadedModel) -> None:
    passes = Passes(model)
    passes.step(2, 0)
    passes.step(2, 1)
    assert passes.ran == 1
    passes.ops._scratch.buffer("residual", 1000, 64)
    for turn in range(2, 5):
        replayed, plain = passes.step(2, turn)
        assert torch.equal(replayed, plain)
    assert passes.ran == 2


def test_tapes_of_replaced_buffers_are_dropped(model: LoadedModel) -> None:
    """Once, each of these tapes kept its old buffers in memory."""
    passes = Passes(model)
    for rows in (2, 3, 4, 5):
        passes.step(rows, rows)
    passes.ops._scratch.buffer("residual", 2000, 64)
    passes.step(2, 0)
    cells = [cell.cell_contents for cell in passes.captured.__closure__ or ()]
    (tapes,) = (each for each in cells if isinstance(each, dict))
    assert len(tapes) == 1


def test_passes_with_torch_operations_are_not_replayed(model: LoadedModel) -> None:
    passes = Passes(model, extra=True)
    for turn in range(4):
        passes.step(2, turn)
    assert passes.ran == 4


def test_each_thread_count_has_its_own_tape(model: LoadedModel) -> None:
    passes, before = Passes(model), torch.get_num_threads()
    try:
        for threads in (1, 2, 1, 2):
            torch.set_num_threads(threads)
            for turn in range(2):
                replayed, plain = passes.step(4, turn)
                assert torch.equal(replayed, plain)
    finally:
        torch.set_num_threads(before)
    assert passes.ran == 2


def test_a_pass_whose_sizes_torch_pads_is_not_replayed(tmp_path: Path) -> None:
    passes = Passes(load_dummy_model(tmp_path, **SIZES | {"intermediate_size": 104}))
    for turn in range(3):
        replayed, plain = passes.step(2, turn)
        assert torch.equal(replayed, plain)
    assert passes.ran == 3
