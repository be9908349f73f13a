"""Gated products in one kernel: against float32, for sizes that no block divides, and where they are taken."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as functional
from torch import Tensor

import quire_worker.ops.triton.gemm_configs as tables
from bench.gpu import choose_gated
from quire_worker.model.arch_spec import Activation
from quire_worker.ops.triton import gemm
from quire_worker.ops.triton.gated_gemm import GatedGemmConfig, GatedGemmConfigs, gated_gemm
from quire_worker.ops.triton.gemm import GemmConfig, GemmConfigs, Gemv, Shape, Tall
from quire_worker.ops.triton.gemm_configs import configs_of, gated_configs_of, gemm_configs_for, read_gated_configs
from quire_worker.ops.triton.triton_ops import TritonOps
from quire_worker.ops.weight import DenseWeight
from tests.kernels.ops.test_triton_ops import DEVICE, PLAIN, TYPES, close, randn

WAY = GatedGemmConfig(32, 16, 32, 4, 3, 2, 5)
FEW = Tall(16, 16, 16, 4, 3)
BESIDE = 3
"""Rows of NaN behind what is read and what is written."""
INNER, INPUTS = 104, 80


def reference(x: Tensor, weight: Tensor, activation: Activation) -> Tensor:
    gate, up = (x.float() @ weight.float().T).chunk(2, dim=-1)
    return (functional.silu(gate) if activation == "silu" else functional.gelu(gate, approximate="tanh")) * up


def poisoned(rows: Tensor) -> Tensor:
    """The same on the device, with NaN behind it."""
    held = torch.full((len(rows) + BESIDE, rows.shape[1]), torch.nan, dtype=rows.dtype, device=DEVICE)
    held[: len(rows)] = rows.to(DEVICE)
    return held


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize(
    ("rows", "inner", "inputs", "config"),
    [
        (70, 104, 96, WAY),
        (130, 64, 40, WAY),  # neither do blocks divide the inner dimension
        (1, 8, 72, WAY),  # one tile, which is larger than everything
        (64, 32, 64, WAY),  # all blocks are full, and fewer tiles than programs
        (97, 72, 72, GatedGemmConfig(32, 16, 32, 4, 3, 3, 1)),  # one program; four tiles of rows in groups of three
        (161, 40, 24, GatedGemmConfig(16, 32, 16, 4, 4, 8, 7)),  # eleven in groups of eight
    ],
)
def test_numbers(
    rows: int, inner: int, inputs: int, config: GatedGemmConfig, activation: Activation, dtype: torch.dtype
) -> None:
    x, weight = randn(rows, inputs, seed=2).to(dtype), (randn(2 * inner, inputs) * inputs**-0.5).to(dtype)
    held, y = poisoned(x), poisoned(torch.full((rows, inner), torch.nan, dtype=dtype))
    gelu = activation == "gelu_tanh"
    made = gated_gemm(held[:rows], poisoned(weight)[: 2 * inner], config, pdl=False, gelu=gelu, out=y[:rows])
    assert made.data_ptr() == y.data_ptr() and close(y[:rows], reference(x, weight, activation))
    assert bool(y[rows:].isnan().all()) and bool(held[rows:].isnan().all()), "nothing behind the rows is written"


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize(
    ("rows", "config"),
    [
        (1, Gemv(8, 32, 4)),
        (2, Gemv(16, 64, 4)),
        (5, Tall(16, 64, 32, 4, 3)),
        (7, Tall(16, 16, 16, 4, 3, shares=4)),
    ],
)
def test_numbers_of_few_rows(rows: int, config: GemmConfig, activation: Activation, dtype: torch.dtype) -> None:
    """By the kernels of plain products. Neither half of a block divides 53 gates."""
    x, weight = randn(rows, 192, seed=2).to(dtype), (randn(2 * 53, 192) * 0.1).to(dtype)
    held, y = poisoned(x), poisoned(torch.full((rows, 53), torch.nan, dtype=dtype))
    made = gemm.gemm(
        held[:rows],
        DenseWeight(poisoned(weight)[: 2 * 53]),
        config,
        pdl=False,
        out=y[:rows],
        activation="silu" if activation == "silu" else "gelu_tanh",
    )
    assert made.data_ptr() == y.data_ptr() and close(y[:rows], reference(x, weight, activation))
    assert bool(y[rows:].isnan().all()), "nothing behind the rows is written"


class TestOps:
    """`TritonOps.gated_linear`, with tables that have ways up to three rows, and from eight rows on."""

    weight = randn(2 * INNER, INPUTS) * INPUTS**-0.5

    @pytest.fixture
    def taken(self, monkeypatch: pytest.MonkeyPatch) -> list[GatedGemmConfig | GemmConfig]:
        """Ways in which the one kernel was launched."""
        seen: list[GatedGemmConfig | GemmConfig] = []

        def counted(x: Tensor, weight: Tensor, config: GatedGemmConfig, pdl: bool, *, gelu: bool) -> Tensor:
            seen.append(config)
            return gated_gemm(x, weight, config, pdl, gelu=gelu)

        def counted_few(x: Tensor, weight: DenseWeight, config: GemmConfig, *args: Any, **options: Any) -> Tensor:
            if "activation" in options:
                seen.append(config)
            return few_rows(x, weight, config, *args, **options)

        few_rows = gemm.gemm
        monkeypatch.setattr(gemm, "gated_gemm", counted)
        monkeypatch.setattr(gemm, "gemm", counted_few)
        return seen

    def holds(self, rows: int, activation: Activation, *, even: bool = False, biased: bool = False) -> bool:
        """Whether what comes out is right."""
        table: dict[Shape, GatedGemmConfig | None] = {(8, 2 * INNER, INPUTS): WAY, (32, 2 * INNER, INPUTS): None}
        few = {(3, 2 * INNER, INPUTS): FEW}
        ops = TritonOps(PLAIN, DEVICE, GemmConfigs(few, table, batch_invariant=even))
        x, bias = randn(rows, INPUTS, seed=2), randn(2 * INNER, seed=3) if biased else torch.zeros(2 * INNER)
        weight = DenseWeight(self.weight.to(DEVICE), bias.to(DEVICE) if biased else None)
        gate, up = functional.linear(x, self.weight, bias).chunk(2, dim=-1)
        wanted = (functional.silu(gate) if activation == "silu" else functional.gelu(gate, approximate="tanh")) * up
        return close(ops.gated_linear(x.to(DEVICE), weight, activation), wanted)

    @pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
    @pytest.mark.parametrize(("rows", "way"), [(1, FEW), (3, FEW), (8, WAY), (31, WAY)])
    def test_one_kernel(
        self, rows: int, way: GatedGemmConfig | GemmConfig, activation: Activation, taken: list[object]
    ) -> None:
        assert self.holds(rows, activation) and taken == [way]

    @pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
    @pytest.mark.parametrize("rows", [4, 7, 32])
    def test_rows_that_have_no_way_are_apart(self, rows: int, activation: Activation, taken: list[object]) -> None:
        assert self.holds(rows, activation) and not taken

    @pytest.mark.parametrize("rows", [2, 9])
    def test_a_bias_is_apart(self, rows: int, taken: list[object]) -> None:
        assert self.holds(rows, "silu", biased=True) and not taken

    @pytest.mark.parametrize("rows", [2, 9])
    def test_even_products_are_apart(self, rows: int, taken: list[object]) -> None:
        assert self.holds(rows, "silu", even=True) and not taken


def test_rows_take_the_way_of_the_largest_that_is_not_above() -> None:
    other = GatedGemmConfig(64, 64, 64, 4, 4, 8, 264)
    ways = GatedGemmConfigs({(64, 96, 32): other, (8, 96, 32): WAY, (16, 96, 32): None, (1, 96, 64): other})
    found = {rows: ways.config_for(rows, 96, 32) for rows in (1, 7, 8, 15, 16, 63, 64, 1 << 20)}
    assert found == {1: None, 7: None, 8: WAY, 15: WAY, 16: None, 63: None, 64: other, 1 << 20: other}
    assert (
        ways.config_for(100, 96, 64) is other
        and ways.config_for(100, 32, 96) is None
        and ways.config_for(100, 96, 33) is None
    )
    assert GatedGemmConfigs({}).config_for(100, 96, 32) is None


def test_all_ways_of_the_h200_are_among_those_that_are_tried() -> None:
    table = gated_configs_of("NVIDIA H200")
    assert {shape[1:] for shape in table} == {(6144, 1024), (28672, 4096)}
    assert {config for config in table.values() if config is not None} <= {*choose_gated.candidates(132)}
    assert table[8192, 28672, 4096] is not None and None in table.values(), "faster for many rows, not for all"
    assert table == read_gated_configs(Path(tables.__file__).parent / "h200_gated.json")


def test_candidates_are_compared_with_two_kernels_for_few_rows_too(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[str] = []

    def run(call: Callable[[int], Tensor], calls: int) -> float:
        call(0)
        return 1.0

    def counted(name: str) -> Callable[..., Tensor]:
        right: Callable[..., Tensor] = getattr(TritonOps, name)

        def count(*args: Any) -> Tensor:
            launched.append(name)
            return right(*args)

        return count

    monkeypatch.setattr(choose_gated, "_timed_us", run)
    monkeypatch.setattr(choose_gated, "_random", lambda rows, columns: randn(rows, columns).to(DEVICE))
    monkeypatch.setattr(choose_gated, "_COLD_BYTES", 1)
    for name in ("linear", "gated_activation"):
        monkeypatch.setattr(TritonOps, name, counted(name))
    ops = TritonOps(PLAIN, DEVICE, GemmConfigs({(3, 2 * INNER, INPUTS): FEW}))
    (entry,) = choose_gated.measure("a model", ops, [], 2 * INNER, INPUTS, [3])
    assert launched == ["linear", "gated_activation"] and entry["way"] is None


def test_products_of_a_device_have_both_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm, "gated_gemm", lambda x, weight, config, pdl, *, gelu: config)
    x, weight = torch.empty(8192, 1024, device="meta"), DenseWeight(torch.empty(6144, 1024, device="meta"))
    known = gemm_configs_for("NVIDIA H200")
    assert all(known.config_for(*shape) == config for shape, config in configs_of("NVIDIA H200").items())
    wanted: object = gated_configs_of("NVIDIA H200")[8192, 6144, 1024]
    assert wanted is not None and known.gated_gemm(x, weight, pdl=False, gelu=False) == wanted
    for without in (gemm_configs_for("NVIDIA H200", batch_invariant=True), gemm_configs_for("nobody's")):
        assert without.gated_gemm(x, weight, pdl=False, gelu=False) is None
    monkeypatch.setattr(gemm, "gemm", lambda x, weight, config, pdl, *, activation: (config, activation))
    few: object = (
        known.gated_gemm(x[:64], weight, pdl=False, gelu=True),
        known.gated_gemm(x[:65], weight, False, gelu=True),
    )
    assert few == ((configs_of("NVIDIA H200")[64, 6144, 1024], "gelu_tanh"), None)
