"""The check of a table's ways of products: right ways hold, and each kind of wrong one is told of."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from bench.gpu import choose_products
from quire_worker.ops.triton import gemm
from quire_worker.ops.triton.gemm import GemmConfig, Gemv, Shape, Tall
from quire_worker.ops.triton.gemm_configs import configs_of
from quire_worker.ops.weight import DenseWeight, Weight
from tests.gpu.products import Bench, tiny_table
from tests.kernels.steps.stepping import DEVICE

SHAPE = 21, 64


def failures(table: dict[Shape, GemmConfig]) -> list[str]:
    with torch.inference_mode():
        return Bench(table, DEVICE).check(*SHAPE).failed


def test_a_few_of_the_real_table_have_every_kind_of_way() -> None:
    table = tiny_table()
    kinds = {(type(config), getattr(config, "shares", 1) > 1) for config in table.values()}
    assert kinds == {(Gemv, False), (Tall, False), (Tall, True)} and {rows for rows, *_ in table} >= {1, 2}


def test_every_number_of_rows_that_a_way_is_taken_for() -> None:
    with torch.inference_mode():
        found = Bench({(1, *SHAPE): Gemv(8, 32, 4), (5, *SHAPE): Tall(16, 16, 32, 4, 3)}, DEVICE).check(*SHAPE)
    assert (found.ways, found.row_counts, found.failed) == (2, 5, []) and found.worst <= 1.0


def test_gates_are_checked_with_their_activation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ups in the place of gates are told of, since silu tells them apart."""
    right, shape = gemm.gemm, (20, 64)

    def check() -> list[str]:
        with torch.inference_mode():
            return Bench({(2, *shape): Gemv(8, 32, 4)}, DEVICE).check(*shape, gated=True).failed

    def swapped(x: Tensor, weight: DenseWeight, *args: Any, **options: Any) -> Tensor:
        return right(x, DenseWeight(torch.cat([*weight.data.chunk(2)][::-1])), *args, **options)

    assert not check()
    monkeypatch.setattr(gemm, "gemm", swapped)
    assert len(check()) == 2


@pytest.mark.parametrize(("rows", "config"), [(3, Gemv(8, 32, 4)), (17, Tall(16, 16, 32, 4, 3))])
def test_way_for_fewer_rows_than_its_entry_is_an_error(rows: int, config: GemmConfig) -> None:
    with pytest.raises(ValueError, match=f"{rows} rows are too many for"):
        failures({(rows, *SHAPE): config})


def test_rows_that_are_left_out_are_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a product is computed, its result is filled with NaN, which stays in rows that the kernel leaves out."""
    right = gemm.gemm

    def leave_out(x: Tensor, weight: DenseWeight, config: GemmConfig, pdl: bool, out: Tensor) -> Tensor:
        return right(x[:16], weight, config, pdl, out[:16])

    monkeypatch.setattr(gemm, "gemm", leave_out)
    (told,) = failures({(17, *SHAPE): Tall(32, 16, 32, 4, 3)})
    assert told.startswith("17 rows by Tall") and "inf" in told


@pytest.mark.parametrize("how", ["a little off", "beside"])
def test_what_is_written_wrongly_is_told_of(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = gemm.gemm

    def wrong(x: Tensor, weight: Weight, config: GemmConfig, pdl: bool, out: Tensor) -> Tensor:
        y = right(x, weight, config, pdl, out)  # type: ignore[arg-type]  # dense
        if how == "beside":
            out.as_strided((1,), (1,), out.storage_offset() + out.numel()).zero_()
            return y
        return y.mul_(1.01)  # in bf16 one alone may be rounded back

    monkeypatch.setattr(gemm, "gemm", wrong)
    (told,) = failures({(1, *SHAPE): Gemv(8, 32, 4)})
    assert ("inf" in told) == (how == "beside")


def test_what_is_measured_anew_takes_its_place_in_a_table() -> None:
    table: list[choose_products.Entry] = []
    for rows, outputs in ((4, 8), (1, 8), (16, 8), (2, 9), (8, 8), (4, 8)):
        choose_products.put(table, {"rows": rows, "outputs": outputs, "inputs": 64, "us": float(len(table))})
    assert [(entry["outputs"], entry["rows"]) for entry in table] == [(8, 1), (8, 4), (8, 8), (8, 16), (9, 2)]
    assert table[1]["us"] == 5.0, "the later figure stands"


def test_all_ways_of_the_table_are_among_those_that_are_tried() -> None:
    table = configs_of("NVIDIA H200")
    assert len(table) > 50
    for shape, config in table.items():
        assert config in [*choose_products.candidates(*shape)], shape


def test_more_than_a_program_may_have_is_not_tried() -> None:
    tried = [config for config in choose_products.candidates(64, 6144, 4096) if isinstance(config, Tall)]
    assert {(config.block_n, config.block_k, config.stages) for config in tried if config.block_k == 128} == {
        (64, 128, 3), (64, 128, 5), (128, 128, 3),
    }, "five buffers of 192 x 128 numbers take 240 KiB"  # fmt: skip  # one line of ways
