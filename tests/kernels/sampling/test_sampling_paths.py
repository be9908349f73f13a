"""The ways of a draw against the reference sampler: scored roughly or not, by candidates or without, drawn again."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from quire_worker.ops.triton import sampling
from quire_worker.sampling.columns import SamplingColumns
from quire_worker.sampling.gumbel import noise_of_rows
from quire_worker.sampling.sampler import sample
from tests.kernels.sampling.sampling_rig import VOCAB, make, on_device, run, without_limits
from tests.tiers import deep_after

# The interpreter computes with numpy, which tells of exp(-inf - most) and the like.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning")
LIMITED = {
    "few candidates": {"_FEW": 64},
    "many": {"_FEW": 8},
    "more than are kept": {"_FEW": 4, "_CANDIDATES": 8},
    "groups in turns": {"_GROUP": 8, "_SEARCH_BLOCK": 32},
    "groups of one": {"_GROUP": 1, "_GROUPS": 512, "_BLOCK": 512},
}


def asking(
    rows: int, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, typical_p: float = 1.0
) -> tuple[Tensor, SamplingColumns]:
    """All rows ask for the same, with seeds of their own."""
    logits, columns = make(rows, 6)
    params = columns.params
    without_limits(columns)
    params["temperature"], params["top_k"], params["top_p"], params["typical_p"] = temperature, top_k, top_p, typical_p
    return logits, columns


def tied(rows: int) -> Tensor:
    """A few values, both zeros among them: equals lie in all blocks."""
    values = torch.tensor([-1.0, -0.0, 0.0, 1.0, 1.5])
    return values[torch.from_numpy(np.random.default_rng(1).integers(0, 5, (rows, VOCAB)))]


@pytest.mark.parametrize("limits", deep_after(2, LIMITED))
def test_the_way_to_a_threshold_does_not_change_it(limits: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in LIMITED[limits].items():
        monkeypatch.setattr(sampling, name, value)
    logits, columns = asking(4, top_k=20, top_p=0.9)
    columns.params["top_p"][1], columns.params["top_k"][2], columns.params["min_p"][3] = 1.0, 5, 0.1
    assert run(logits, on_device(columns))[0] == sample(logits, columns).tolist()


@pytest.mark.parametrize(("top_k", "top_p"), deep_after(2, [(1, 1.0), (400, 0.5), (400, 1.0), (0, 0.3), (0, 0.9)]))
def test_all_equals_of_the_last_that_is_kept_are_kept(top_k: int, top_p: float) -> None:
    _, columns = asking(4, top_k=top_k, top_p=top_p)
    logits = tied(4)
    logits[0, :1400], logits[0, 1400:] = -1.0, 2.0
    assert run(logits, on_device(columns))[0] == sample(logits, columns).tolist()


def test_one_block_may_hold_all_that_is_kept() -> None:
    logits, columns = asking(3, top_k=3)
    for row, first in enumerate((0, 1022, VOCAB - 3)):
        logits[row, first : first + 3] = torch.tensor([40.0, 41.0, 40.5])
    token = run(logits, on_device(columns))[0]
    assert token == sample(logits, columns).tolist()
    assert all(first <= each < first + 3 for each, first in zip(token, (0, 1022, VOCAB - 3), strict=True))


@pytest.mark.parametrize("top_p", deep_after(1, [0.5, 0.05, 0.0]))
def test_what_is_not_in_the_nucleus_is_drawn_again(top_p: float) -> None:
    logits, columns = asking(8, temperature=1.7, top_p=top_p)
    columns.params["min_p"][::2] = 0.01
    logits[7, :] = float("-inf")
    logits[7, [3, 1300]] = torch.tensor([-2.0, -3.0])
    token = run(logits, on_device(columns))[0]
    assert token == sample(logits, columns).tolist()
    columns.params["top_p"][:], columns.params["min_p"][:] = 1.0, 0.0
    assert sum(a != b for a, b in zip(token, sample(logits, columns).tolist(), strict=True)) >= 2


@pytest.mark.parametrize("typical_p", deep_after(2, [0.5, 0.05, 0.9, 1e-6]))
@pytest.mark.parametrize(("top_k", "top_p"), deep_after(2, [(0, 1.0), (0, 0.8), (5, 1.0), (50, 0.7), (1400, 0.9)]))
def test_what_is_untypical_is_not_drawn(top_k: int, top_p: float, typical_p: float) -> None:
    logits, columns = asking(6, temperature=1.7, top_k=top_k, top_p=top_p, typical_p=typical_p)
    columns.params["min_p"][::2], columns.params["typical_p"][5] = 0.01, 1.0
    logits[4, :] = float("-inf")
    logits[4, [3, 1300]] = torch.tensor([-2.0, -3.0])
    assert run(logits, on_device(columns))[0] == sample(logits, columns).tolist()


@pytest.mark.deep
def test_equals_are_as_typical_as_one_another() -> None:
    _, columns = asking(4, typical_p=0.3)
    logits = tied(4)
    logits[0, :1400], logits[0, 1400:] = -1.0, 2.0
    logits[1] = 0.0
    assert run(logits, on_device(columns))[0] == sample(logits, columns).tolist()


def test_of_a_damaged_row_nothing_is_typical() -> None:
    logits, columns = asking(4, typical_p=0.5)
    wanted = sample(logits, columns).tolist()
    logits[1, 700], logits[2, 9], logits[3, :] = float("nan"), float("inf"), float("-inf")
    assert run(logits, on_device(columns))[0] == [wanted[0], -1, -1, -1]


@pytest.mark.deep
@pytest.mark.parametrize(("vocab", "top_k", "top_p"), [(12, 14, 0.5), (5, 16, 0.8), (5, 5, 0.8), (5, 4, 0.8)])
def test_of_a_small_vocabulary_top_k_may_keep_all(vocab: int, top_k: int, top_p: float) -> None:
    logits, columns = asking(24, temperature=1.7, top_k=top_k, top_p=top_p)
    logits = logits[:, :vocab].contiguous()
    assert run(logits, on_device(columns))[0] == sample(logits, columns).tolist()


@pytest.mark.deep
def test_of_many_that_top_k_keeps_no_weight_leaves_the_largest() -> None:
    logits, columns = asking(6, top_k=1400, top_p=0.0)
    assert run(logits, on_device(columns))[0] == sample(logits, columns).tolist() == logits.argmax(dim=1).tolist()


def test_a_nucleus_knows_nothing_of_blocked_ids() -> None:
    logits, columns = asking(4, top_p=0.3)
    top = logits.topk(2, dim=1).indices
    columns.blocked = {row: top[row].numpy().astype(np.int32) for row in range(4)}
    device = on_device(columns, blocked=[1] * 4, stop_id=top.tolist())
    assert run(logits, device)[0] == sample(logits, columns).tolist()


@pytest.mark.deep
def test_equals_that_hardly_any_noise_parts_are_told_apart() -> None:
    """Scores of 2**22 are a half apart: some are equal, more are nearly so, and the lowest id wins."""
    _, columns = asking(3, temperature=2.0**-16)
    logits = torch.full((3, VOCAB), 64.0)
    logits[1, ::2] = 63.0
    noise = noise_of_rows(columns.params["seed"], columns.params["sample_index"], columns.position, VOCAB)
    score = (logits.double().numpy() * 2.0**16 + noise).astype(np.float32)
    assert ((score > score.max(axis=1, keepdims=True) - 3).sum(axis=1) > 5).any()
    assert run(logits, on_device(columns), filtered=False)[0] == score.argmax(axis=1).tolist()


def test_flat_rows_are_drawn_by_their_noise_alone() -> None:
    _, columns = asking(6)
    logits = torch.zeros(6, VOCAB)
    token = run(logits, on_device(columns), filtered=False)[0]
    assert token == sample(logits, columns).tolist() and len(set(token)) == 6


def test_an_infinite_logit_draws_nothing() -> None:
    logits, columns = asking(4, top_p=0.9)
    columns.params["top_p"][2:], columns.params["top_k"][3] = 1.0, 5
    wanted = sample(logits, columns).tolist()
    logits[1:, 9] = float("inf")
    assert run(logits, on_device(columns))[0] == [wanted[0], -1, -1, -1]


def test_a_nan_is_found_where_nothing_is_kept() -> None:
    logits, columns = asking(4, top_k=3)
    columns.params["top_k"][1], columns.params["min_p"][1], columns.params["top_k"][2], columns.params["top_p"][2] = (
        0,
        0.5,
        0,
        0.1,
    )
    logits[:, 1000] = 50.0
    wanted = sample(logits, columns).tolist()
    logits[:3, 300] = float("nan")
    assert run(logits, on_device(columns))[0] == [-1, -1, -1, wanted[3]]
