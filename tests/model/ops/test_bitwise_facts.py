"""What torch must do for the CPU engine to be batch-invariant. An upgrade that breaks one of these shows here first."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from quire_worker.ops import torch_reference
from quire_worker.ops.interface import HeadShape
from quire_worker.ops.invariance import attention_row_tile
from quire_worker.ops.torch_reference import TorchOps
from quire_worker.ops.weight import DenseWeight

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


@pytest.mark.parametrize(
    ("inputs", "outputs"), [(48, 80), (64, 96), (256, 1408), (704, 256), (3072, 128), (2048, 512), (1024, 1500)]
)
def test_a_row_of_linear_does_not_depend_on_the_number_of_rows(inputs: int, outputs: int) -> None:
    x, weight = randn(320, inputs), DenseWeight(randn(outputs, inputs), randn(outputs))
    ops = TorchOps(HeadShape(4, 2, 16, 1.0), 16)
    whole = ops.linear(x, weight)
    for rows in (16, 32, 48, 64, 128, 160, 256):
        for begin in (0, 16, 64):
            part = ops.linear(x[begin : begin + rows], weight)
            assert torch.equal(part, whole[begin : begin + rows]), (rows, begin)


def test_linear_in_blocks_is_linear(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is done where a product depends on its rows, tried on whatever machine this is."""
    monkeypatch.setattr(torch_reference, "gemm_depends_on_rows", lambda outputs, inputs: True)
    x, weight = randn(80, 96), DenseWeight(randn(40, 96), randn(40))
    found = TorchOps(HeadShape(4, 2, 16, 1.0), 16).linear(x, weight)
    assert torch.allclose(found, torch.nn.functional.linear(x, weight.data, weight.bias), atol=1e-4)
    assert torch.equal(found[16:32], torch.nn.functional.linear(x[16:32], weight.data, weight.bias))


@pytest.mark.parametrize("dim", [12, 16, 32, 64, 128])
def test_an_item_of_a_batched_product_depends_on_nothing_from_the_measured_rows_on(dim: int, threads: int) -> None:
    measured = attention_row_tile(dim, 64, 4)
    assert measured is not None, "this machine is not batch-invariant: see ModelFacts.capabilities"
    row_tile = max(measured, 16 if threads > 1 else 0)
    key, value, query = randn(12, 2, 64, dim).unbind(1)[0], randn(12, 64, dim), randn(12, 256, dim)
    weights = randn(12, 256, 64).abs()
    scores, sums = torch.bmm(query, key.transpose(1, 2)), torch.bmm(weights, value)
    for rows in (1, 2, 3, 5, 7):
        for items in (1, 2, 3, 5, 12):
            at = slice(0, items), slice(16, 16 + rows * row_tile)
            found = torch.bmm(query[at].contiguous(), key[:items].transpose(1, 2))
            assert torch.equal(found, scores[at]), (rows, items)
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
