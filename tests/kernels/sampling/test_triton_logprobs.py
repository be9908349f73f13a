"""Logprobs on the device against the same in torch, and what a step's buffers carry: the right entries, in time."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from quire_worker.cuda.device_logprobs import DeviceLogprobs
from quire_worker.cuda.pinned_ring import PinnedRing
from quire_worker.ops.triton import logprobs
from quire_worker.ops.triton.logprobs import packed_logprobs, torch_logprobs
from quire_worker.sampling.logprobs import logprob_columns
from tests.tiers import deep_after

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# The interpreter computes with numpy, which tells of exp(-inf - most) and the like.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning")
VOCAB = 9001
"""Nine blocks, the last not whole."""
INF, NAN = float("inf"), float("nan")


def normal(rows: int, seed: int = 0) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(0.0, 4.0, (rows, VOCAB)).astype(np.float32))


def tied() -> Tensor:
    """A few values, both zeros among them: equals lie in all blocks."""
    values = torch.tensor([-1.0, -0.0, 0.0, 1.0, 2.0])
    return values[torch.from_numpy(np.random.default_rng(1).integers(0, 5, (4, VOCAB)))]


def extreme() -> Tensor:
    """Large and small, and rows that have fewer tokens than are asked for."""
    logits = normal(6)
    logits[0] *= 1e30
    logits[1] -= 3e4
    logits[2] = -INF
    logits[2, [4095, 4096, 9000]] = torch.tensor([1.0, 2.0, 1.0])
    logits[3] = -INF
    logits[4, 5000] = 3e38
    logits[5, 4096:8192] = -INF
    return logits


def poisoned() -> Tensor:
    logits = normal(6)
    logits[0, [7, 8999]] = NAN
    logits[1, 4500] = -NAN
    logits[2] = NAN
    logits[3, 9000] = INF
    logits[4, 4096:8192] = -NAN
    logits[5, 3], logits[5, 5000] = INF, NAN
    return logits


INPUTS = {"normal": normal(5), "tied": tied(), "extreme": extreme(), "poisoned": poisoned()}


def floats(words: Tensor) -> Tensor:
    return words.contiguous().view(torch.float32)


def assert_same(found: Tensor, wanted: Tensor, most: int) -> None:
    """Ranks and ids to the bit; logprobs are summed in another order."""
    assert found.shape == wanted.shape == (len(wanted), 2 + 2 * most) and found.dtype == torch.int32
    assert torch.equal(found[:, 1 : 2 + most], wanted[:, 1 : 2 + most])
    for columns in (slice(0, 1), slice(2 + most, None)):
        ours, theirs = floats(found[:, columns]), floats(wanted[:, columns])
        torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=2e-5, equal_nan=True)


@pytest.mark.parametrize("most", deep_after(2, [5, 33, 0, 1, 20, 32]))
@pytest.mark.parametrize("kind", deep_after(2, INPUTS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernels_say_what_torch_says(
    kind: str, most: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logprobs, "_AT_ONCE", 2)
    logits = INPUTS[kind].to(DEVICE, dtype)
    rows = len(logits)
    token = torch.from_numpy(np.random.default_rng(most).integers(0, VOCAB, rows).astype(np.int32)).to(DEVICE)
    token[0] = -1
    token[1] = logits[1].argmax()
    row = torch.arange(rows, dtype=torch.int32, device=DEVICE)
    assert_same(packed_logprobs(logits, token, row, most), torch_logprobs(logits, token, row, most), most)


def test_entries_are_of_the_rows_that_are_named() -> None:
    logits = normal(6).to(DEVICE)
    logits[[0, 5]] = NAN
    token = torch.tensor([1, 2, 3, 4, 5, 6], dtype=torch.int32, device=DEVICE)
    row = torch.tensor([4, 1, 1, 3], dtype=torch.int32, device=DEVICE)
    packed = packed_logprobs(logits, token, row, 3)
    assert not floats(packed[:, -3:]).isnan().any() and torch.equal(packed[1], packed[2])
    assert_same(packed, torch_logprobs(logits, token, row, 3), 3)


@pytest.mark.parametrize("vocab", [1, 40, 1024])
def test_of_one_block_all_tokens_can_be_named(vocab: int) -> None:
    logits = normal(3)[:, :vocab].contiguous().to(DEVICE)
    token = torch.zeros(3, dtype=torch.int32, device=DEVICE)
    row = torch.tensor([2, 0], dtype=torch.int32, device=DEVICE)
    most = min(vocab, 32)
    assert_same(packed_logprobs(logits, token, row, most), torch_logprobs(logits, token, row, most), most)


def synchronize() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


@pytest.mark.deep
@pytest.mark.parametrize("most", [0, 4, 40])
def test_steps_under_way_keep_what_was_asked_of_each(most: int) -> None:
    """Three are started before the first is read, and more than there are buffers."""
    kept = DeviceLogprobs(DEVICE, 3)
    rng = np.random.default_rng(most)
    for _ in range(2):
        steps, waiting = [], []
        for count in (5, 5, 2):
            logits, token = normal(6, int(rng.integers(99))), rng.integers(0, VOCAB, 6).astype(np.int32)
            row = np.arange(count, dtype=np.int32) if count == 5 else np.array([4, 2], np.int32)
            wanted = rng.integers(0, most + 1, count).astype(np.int32)
            wanted[0] = most
            steps.append((logits, token, row, wanted))
            there = logits.to(DEVICE), torch.from_numpy(token).to(DEVICE)
            waiting.append(kept.start(*there, row, row + 10, wanted))
        synchronize()
        for (logits, token, row, wanted), pending in zip(steps, waiting, strict=True):
            drawn = np.full(20, -1, np.int32)
            drawn[row + 10] = token[row]
            drawn[row[1] + 10] = -1
            drew = np.delete(np.arange(len(row)), 1)
            expected = logprob_columns(logits[torch.from_numpy(row[drew])], token[row[drew]], wanted[drew])
            columns = pending.columns(drawn)
            assert columns is not None and expected is not None
            assert columns.token_index.tolist() == (row[drew] + 10).tolist()
            for name in ("rank", "top_count", "top_id"):
                assert getattr(columns, name).tolist() == getattr(expected, name).tolist(), name
            for name in ("logprob", "top_logprob"):
                assert getattr(columns, name).dtype == np.float32
                np.testing.assert_allclose(getattr(columns, name), getattr(expected, name), atol=2e-5)


def test_more_alternatives_than_tokens_are_all_tokens_and_nobody_is_nothing() -> None:
    row = np.array([1], np.int32)
    logits, token = normal(2)[:, :7].contiguous().to(DEVICE), torch.zeros(2, dtype=torch.int32, device=DEVICE)
    pending = DeviceLogprobs(DEVICE, 1).start(logits, token, row, row, np.array([9], np.int32))
    synchronize()
    columns = pending.columns(np.array([-1, 0], np.int32))
    assert columns is not None and columns.top_count.tolist() == [7] and sorted(columns.top_id.tolist()) == [*range(7)]
    assert pending.columns(np.array([0, -1], np.int32)) is None


def test_a_ring_gives_its_buffers_in_turn_and_lets_them_grow() -> None:
    ring = PinnedRing(2, DEVICE)
    first, second = ring.next_buffer(3), ring.next_buffer(5)
    assert len(first) == 3 and len(second) == 5 and first.is_pinned() == (DEVICE.type == "cuda")
    assert ring.next_buffer(2).data_ptr() == first.data_ptr() != second.data_ptr()
    grown = ring.next_buffer(1000)
    assert len(grown) == 1000 and ring.next_buffer(4).data_ptr() == first.data_ptr()
    assert ring.next_buffer(900).data_ptr() == grown.data_ptr()
