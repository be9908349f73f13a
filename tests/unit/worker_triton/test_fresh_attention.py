"""Fresh prompts of a step: which go together, and that this changes nothing."""

from __future__ import annotations

import pytest
import torch

from quire_worker.ops.interface import HeadShape
from quire_worker.ops.triton import fresh_attention as module
from quire_worker.ops.triton.fresh_attention import Fresh, FreshPlans, fresh_attention, in_batches

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SHAPE = HeadShape(4, 2, 32, 0.3)


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PIECE", 8)
    monkeypatch.setattr(module, "LEAST_TOKENS", 16)


def test_those_of_one_length_go_together_if_nothing_lies_between() -> None:
    a, b, c, d = Fresh(3, 16), Fresh(19, 16), Fresh(35, 24), Fresh(59, 24)
    assert in_batches((a, b, c, d)) == [(a, 2), (c, 2)]
    assert in_batches((a, Fresh(20, 16))) == [(a, 1), (Fresh(20, 16), 1)]
    padded = Fresh(0, 15), Fresh(15, 15)
    assert in_batches(padded) == [(padded[0], 1), (padded[1], 1)]
    assert in_batches((a,)) == [(a, 1)] and in_batches(()) == []


@pytest.mark.parametrize("fresh", [(Fresh(1, 16), Fresh(17, 16)), (Fresh(0, 8), Fresh(8, 8), Fresh(16, 13))])
def test_together_they_come_to_what_each_does_alone(fresh: tuple[Fresh, ...]) -> None:
    generator = torch.Generator().manual_seed(4)
    qkv = torch.randn(40, 8 * 32, generator=generator).to(DEVICE)
    query = torch.randn(40, 4 * 32, generator=generator).to(DEVICE)
    together, alone = torch.full_like(query, 7.0), torch.full_like(query, 7.0)
    fresh_attention(query, qkv, fresh, SHAPE, together)
    for chunk in fresh:
        fresh_attention(query, qkv, (chunk,), SHAPE, alone)
        begin, end = chunk.row, chunk.row + chunk.tokens
        q = query[begin:end].view(-1, 4, 32).transpose(0, 1)
        k, v = (qkv[begin:end, at : at + 64].view(-1, 2, 32).transpose(0, 1) for at in (128, 192))
        plain = torch.nn.functional.scaled_dot_product_attention(
            q, k.repeat_interleave(2, 0), v.repeat_interleave(2, 0), is_causal=True, scale=0.3
        )
        assert torch.allclose(together[begin:end], plain.transpose(0, 1).flatten(1), atol=2e-3)
    assert torch.allclose(together, alone, atol=2e-3)
    rows = {row for chunk in fresh for row in range(chunk.row, chunk.row + chunk.tokens)}
    assert all(row in rows or bool((together[row] == 7.0).all()) for row in range(40)), "other rows are others'"


def test_plans_are_made_for_all_lengths_and_for_batches() -> None:
    plans = FreshPlans(SHAPE, torch.device("cpu"), 48)
    made = 1
    while plans.make():
        made += 1
    # 16 to 48 by 8; two of 16 and 24, three of 16.
    assert made == 5 + 2 + 1 and plans.begun and not FreshPlans(SHAPE, torch.device("cpu"), 8).make()
