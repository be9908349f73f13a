"""With how many threads a product is computed may change its bits: then the number of threads is not changed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from quire_worker.ops import invariance
from quire_worker.ops.cpu_ops import CpuOps
from quire_worker.ops.interface import HeadShape
from quire_worker.ops.weight import DenseWeight

SHAPE = HeadShape(4, 2, 32, 32**-0.5)


@pytest.fixture(autouse=True)
def four_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


def test_one_that_has_the_same_bits() -> None:
    assert not invariance.gemm_depends_on_threads(64, 32)
    assert torch.get_num_threads() == 4


@pytest.mark.parametrize("different", [1, 2])
def test_one_that_has_others_with_fewer_threads(monkeypatch: pytest.MonkeyPatch, different: int) -> None:
    linear = torch.nn.functional.linear

    def altered(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return linear(x, weight, bias) + (torch.get_num_threads() == different) * 1e-3

    monkeypatch.setattr("torch.nn.functional.linear", altered)
    assert invariance.gemm_depends_on_threads(64, 32)
    assert torch.get_num_threads() == 4
    ops = CpuOps(SHAPE, 16)
    assert not ops.depends_on_threads
    ops.prepare(DenseWeight(torch.zeros(64, 32)))
    assert ops.depends_on_threads
