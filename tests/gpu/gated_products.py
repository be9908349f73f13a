"""Stage 1: every way of the device's table of gated products, at the very shape that it was measured for.

A few of the numbers of rows that a way is taken for, the least and the largest among them, are computed as in a
worker's step (product_chain.py). The reference is float32, of the same bf16 numbers.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as functional
from torch import Tensor

from bench import ROOT
from bench.gpu.record import Recorder
from quire_worker.ops.triton import gated_gemm
from quire_worker.ops.triton.gated_gemm import GatedGemmConfig, GatedGemmConfigs
from quire_worker.ops.triton.gemm import Shape
from quire_worker.ops.triton.gemm_configs import gated_configs_of, read_gated_configs
from tests.gpu.product_chain import Found, ProductChain

_TABLE = ROOT / "services/worker/quire_worker/ops/triton/gemm_configs/h200_gated.json"
# Gates and what they gate are multiplied as float32 sums, so the result is rounded once, which ROUNDING allows for. An
# error of either sum counts as often as the other factor is large: in millions of results that is some five times the
# usual. So twice of what plain products may be off by, of the usual result; float32 sums leave a small part of that.
_SUMMING = {torch.bfloat16: 2.0**-9, torch.float32: 2.0**-16}
_PART = 4096
_BEYOND = 77
"""More rows than the largest entry has."""


def run(recorder: Recorder, *, tiny: bool) -> None:
    """The table of the GPU; that of the H200 where nobody has measured the GPU; a tiny one without a GPU."""
    on_gpu = torch.cuda.is_available()
    table = tiny_table()
    if on_gpu:
        own = gated_configs_of(torch.cuda.get_device_name())
        if not own:
            recorder.skip("the GPU's own table of gated products", "nobody has measured it: activations are apart")
        table = own or read_gated_configs(_TABLE)
    shapes = sorted({shape[1:] for shape, config in table.items() if config is not None})
    bench = GatedBench(table, torch.device("cuda" if on_gpu else "cpu"))
    with torch.inference_mode():
        for outputs, inputs in shapes[:1] if tiny else shapes:
            title = f"gated products {outputs} x {inputs}"
            with recorder.attempt(title):
                bench.check(outputs, inputs).tell(recorder, title)


def tiny_table() -> dict[Shape, GatedGemmConfig | None]:
    """One shape that its blocks do not divide, with rows between its ways for which there is none."""
    config = GatedGemmConfig(block_m=32, block_n=16, block_k=32, warps=4, stages=3, group=2, programs=5)
    return {(3, 48, 40): config, (9, 48, 40): None, (33, 48, 40): config}


def row_counts(least: int, until: int, tile: int) -> list[int]:
    """Some of `least` and more, all below `until`: both ends, and one in the middle that the tile does not divide."""
    middle = (least + until) // 2 // tile * tile + tile // 2 + 1
    return sorted({rows for rows in (least, least + 1, middle, until - 1) if least <= rows < until})


class GatedBench:
    """Weights of a table's shapes on a device, one at a time."""

    def __init__(self, table: Mapping[Shape, GatedGemmConfig | None], device: torch.device) -> None:
        self._table = table
        self._products = GatedGemmConfigs(table)
        self._chain = ProductChain(device)

    def check(self, outputs: int, inputs: int) -> Found:
        """All ways of a weight's shape, each with some of the numbers of rows that it is taken for."""
        found = Found()
        known = sorted(rows for rows, *shape in self._table if shape == [outputs, inputs])
        ends = [*known[1:], known[-1] + _BEYOND + 1]
        weight, source = self._chain.operands(outputs, inputs, ends[-1] - 1)
        wanted = _reference(source, weight)
        for least, until in zip(known, ends, strict=True):
            config = self._table[least, outputs, inputs]
            if config is None:
                continue
            found.ways += 1
            for rows in row_counts(least, until, config.block_m):
                if self._products.config_for(rows, outputs, inputs) != config:
                    found.failed.append(f"{rows} rows do not take {config}")
                found.add(rows, config, self._error(weight, config, source, wanted[:rows]))
        return found

    def _error(self, weight: Tensor, config: GatedGemmConfig, source: Tensor, wanted: Tensor) -> float:
        return self._chain.error(
            lambda x, out: gated_gemm.gated_gemm(x, weight, config, pdl=True, out=out),
            source,
            wanted,
            _SUMMING[self._chain.dtype],
        )


def _reference(source: Tensor, weight: Tensor) -> Tensor:
    """So many gates at a time, since float32 takes twice the memory."""
    x, parts = source.float(), [torch.split(half, _PART) for half in weight.chunk(2)]
    made = [functional.silu(x @ gate.float().T) * (x @ up.float().T) for gate, up in zip(*parts, strict=True)]
    return torch.cat(made, dim=1)
