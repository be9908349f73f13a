"""The check of a table's gated products: right ways hold, and each kind of wrong one is told of."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quire_worker.ops.triton import gated_gemm
from quire_worker.ops.triton.gated_gemm import GatedGemmConfig, GatedGemmConfigs
from tests.gpu.gated_products import GatedBench, row_counts, tiny_table
from tests.gpu.product_chain import Found
from tests.kernels.steps.stepping import DEVICE
from tests.tiers import deep_after

SHAPE = 48, 40
WAY = GatedGemmConfig(16, 16, 32, 4, 3, 2, 5)


def check(table: dict[tuple[int, int, int], GatedGemmConfig | None]) -> Found:
    with torch.inference_mode():
        return GatedBench(table, DEVICE).check(*SHAPE)


def test_every_way_at_both_ends_and_between() -> None:
    found = check({(3, *SHAPE): WAY, (20, *SHAPE): None, (40, *SHAPE): WAY})
    assert (found.ways, found.row_counts, found.failed) == (2, 8, []) and 0.0 < found.worst <= 1.0


def test_the_tiny_table_has_a_shape_that_blocks_do_not_divide() -> None:
    table = tiny_table()
    assert {shape[1:] for shape in table} == {SHAPE} and None in table.values()
    for config in table.values():
        assert config is None or (SHAPE[0] // 2 % config.block_n and SHAPE[1] % config.block_k)


def test_rows_that_are_checked_are_those_that_a_way_is_taken_for() -> None:
    assert row_counts(8192, 8192 + 78, 128) == [8192, 8193, 8192 + 65, 8192 + 77]
    assert row_counts(1024, 2048, 128) == [1024, 1025, 1536 + 65, 2047]
    assert row_counts(128, 129, 128) == [128] and row_counts(4, 6, 128) == [4, 5]


@pytest.mark.deep
@pytest.mark.parametrize("how", deep_after(2, ["rows left out", "none", "a little off", "gates for ups", "behind"]))
def test_what_is_written_wrongly_is_told_of(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = gated_gemm.gated_gemm

    def wrong(x: Tensor, weight: Tensor, config: GatedGemmConfig, pdl: bool, *, out: Tensor) -> Tensor:
        if how == "rows left out":
            right(x[:-1], weight, config, pdl, out=out[:-1])
        elif how == "gates for ups":
            right(x, torch.cat([*weight.chunk(2)][::-1]), config, pdl, out=out)
        elif how != "none":
            right(x, weight, config, pdl, out=out)
        if how == "behind":
            out.as_strided((1,), (1,), out.storage_offset() + out.numel()).zero_()
        return out.mul_(1.01) if how == "a little off" else out  # in bf16 one alone may be rounded back

    monkeypatch.setattr(gated_gemm, "gated_gemm", wrong)
    found = check({(3, *SHAPE): WAY})
    assert len(found.failed) == found.row_counts == 4
    assert all(("inf" in told) == (how in ("rows left out", "behind", "none")) for told in found.failed)


@pytest.mark.deep
def test_rows_that_take_another_way_are_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GatedGemmConfigs, "config_for", lambda self, rows, outputs, inputs: WAY if rows > 3 else None)
    (told,) = check({(3, *SHAPE): WAY}).failed
    assert told.startswith("3 rows do not take GatedGemmConfig(")
