"""What torch must do for the CPU engine to be batch-invariant. An upgrade that breaks one of these shows here first."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

ELEMENTWISE: dict[str, Callable[[Tensor], Tensor]] = {
    "exp": torch.exp,
    "exp float64": lambda x: torch.exp(x.double()),
    "log float64": lambda x: torch.log(x.double().abs() + 1e-9),
    "tanh": torch.tanh,
    "rsqrt": lambda x: torch.rsqrt(x.abs() + 1e-6),
    "division": lambda x: 1.0 / (x + 100.0),
}


@pytest.fixture(params=[1, 2, 3], autouse=True)
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_an_element_does_not_depend_on_where_it_lies(name: str) -> None:
    function = ELEMENTWISE[name]
    x = randn(1 << 17) * 10
    whole = function(x)
    for begin in (0, 1, 7, 16, 33):
        for size in (1, 2, 15, 17, 31, 100, 65_533, 100_001):
            assert torch.equal(function(x[begin : begin + size]), whole[begin : begin + size]), (begin, size)
    assert torch.equal(function(x.view(-1, 8, 64)[:, :3]), whole.view(-1, 8, 64)[:, :3])


@pytest.mark.parametrize(("inputs", "outputs"), [(48, 80), (64, 96), (256, 1408), (704, 256), (3072, 128)])
def test_a_row_of_a_product_does_not_depend_on_the_number_of_rows(inputs: int, outputs: int) -> None:
    x, weight, bias = randn(320, inputs), randn(outputs, inputs), randn(outputs)
    whole = torch.nn.functional.linear(x, weight, bias)
    for rows in (16, 32, 48, 64, 128, 160, 256):
        for begin in (0, 16, 64):
            part = torch.nn.functional.linear(x[begin : begin + rows], weight, bias)
            assert torch.equal(part, whole[begin : begin + rows]), (rows, begin)


@pytest.mark.parametrize("dim", [12, 16, 32, 64, 128])
def test_an_item_of_a_batched_product_does_not_depend_on_items_or_rows(dim: int, threads: int) -> None:
    key, value, query = randn(12, 2, 64, dim).unbind(1)[0], randn(12, 64, dim), randn(12, 256, dim)
    weights = randn(12, 256, 64).abs()
    scores, sums = torch.bmm(query, key.transpose(1, 2)), torch.bmm(weights, value)
    for rows in (4, 8, 16, 64) if threads == 1 else (16, 32, 64):
        for items in (1, 2, 3, 12):
            at = slice(0, items), slice(16, 16 + rows)
            assert torch.equal(torch.bmm(query[at].contiguous(), key[:items].transpose(1, 2)), scores[at]), (
                rows,
                items,
            )
            assert torch.equal(torch.bmm(weights[at].contiguous(), value[:items]), sums[at]), (rows, items)


def test_reductions_over_the_last_axis_are_per_row() -> None:
    x = randn(256, 16, 64)
    for rows in (1, 2, 3, 16):
        for items in (1, 5, 256):
            part = x[:items, :rows]
            assert torch.equal(part.sum(-1), x.sum(-1)[:items, :rows])
            assert torch.equal(part.amax(-1), x.amax(-1)[:items, :rows])
    wide = randn(64, 256)
    for rows in (16, 32, 48):
        assert torch.equal(wide[:rows].square().mean(-1), wide.square().mean(-1)[:rows])


def test_exp_is_exact_at_zero_and_at_minus_infinity() -> None:
    assert torch.exp(torch.zeros(77)).eq(1).all() and torch.exp(torch.full((77,), -torch.inf)).eq(0).all()
