"""Stage 1: every way of the device's table of products, at the very shape that it was measured for.

Each number of rows that a way is taken for is computed as in a worker's step (product_chain.py). For a weight of gates
and ups, silu(gates) * ups is computed too. The reference is float32, of the same bf16 numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
import torch.nn.functional as functional
from torch import Tensor

from bench import ROOT
from bench.gpu.record import Recorder
from bench.gpu.shapes import SHAPES, products_of
from quire_worker.ops.triton import gemm
from quire_worker.ops.triton.gemm import GemmConfig, GemmConfigs, Shape
from quire_worker.ops.triton.gemm_configs import configs_of, read_configs
from quire_worker.ops.weight import DenseWeight
from tests.gpu.product_chain import Found, ProductChain

_TABLE = ROOT / "services/worker/quire_worker/ops/triton/gemm_configs/h200.json"
# Sums of thousands may be off by so much of the usual result, beside what rounding leaves.
_SUMMING = {torch.bfloat16: 2.0**-10, torch.float32: 2.0**-17}
# Twice as much for gated layers: an error of the gate is multiplied by the up, and an error of the up by the gate.
_SUMMING_GATED = {torch.bfloat16: 2.0**-9, torch.float32: 2.0**-16}
_PART = 16_384


def run(recorder: Recorder, *, tiny: bool) -> None:
    """The table of the GPU; that of the H200 where nobody has measured the GPU; a few tiny shapes without one."""
    on_gpu = torch.cuda.is_available()
    table = tiny_table()
    if on_gpu:
        own = configs_of(torch.cuda.get_device_name())
        if not own:
            recorder.skip("the GPU's own table", "nobody has measured it: its products are cuBLAS's")
        table = own or read_configs(_TABLE)
    shapes = sorted({shape[1:] for shape in table})
    bench = Bench(table, torch.device("cuda" if on_gpu else "cpu"))
    gates = {products_of(spec)["gate_up"] for spec in SHAPES.values()} if on_gpu else set(shapes)
    with torch.inference_mode():
        for outputs, inputs in shapes[:2] if tiny and on_gpu else shapes:
            for gated in (False, True) if (outputs, inputs) in gates else (False,):
                title = f"products {outputs} x {inputs}" + (", gated" if gated else "")
                with recorder.attempt(title):
                    bench.check(outputs, inputs, gated=gated).tell(recorder, title)


def tiny_table() -> dict[Shape, GemmConfig]:
    """The first way of each kind that a real table has, for shapes that its blocks do not divide."""
    kinds: dict[tuple[object, ...], tuple[int, GemmConfig]] = {}
    for (rows, _, _), config in read_configs(_TABLE).items():
        kinds.setdefault((type(config), rows > 1, getattr(config, "shares", 1) > 1), (rows, config))
    return {
        (rows, config.block_n + 6, 2 * config.block_k * getattr(config, "shares", 1)): config
        for rows, config in kinds.values()
    }


class Bench:
    """Weights of a table's shapes on a device, one at a time."""

    def __init__(self, table: Mapping[Shape, GemmConfig], device: torch.device) -> None:
        self._table = table
        self._products = GemmConfigs(table)
        self._chain = ProductChain(device)

    def check(self, outputs: int, inputs: int, *, gated: bool = False) -> Found:
        """All ways of a weight's shape, each with all numbers of rows that it is taken for. `gated`: the outputs are
        gates and ups."""
        found, least = Found(), 1
        known = sorted(rows for rows, *shape in self._table if shape == [outputs, inputs])
        data, source = self._chain.operands(outputs, inputs, known[-1])
        weight = DenseWeight(data)
        # Rows of float32 weights at a time: the largest take 2 GiB.
        wanted = torch.cat([source.float() @ part.float().T for part in torch.split(data, _PART)], dim=1)
        if gated:
            gate, up = wanted.chunk(2, dim=1)
            wanted = functional.silu(gate) * up
        summing = (_SUMMING_GATED if gated else _SUMMING)[self._chain.dtype]
        for most in known:
            config = self._table[most, outputs, inputs]
            found.ways += 1
            for rows in range(least, most + 1):
                if self._products.config_for(rows, outputs, inputs) != config:
                    found.failed.append(f"{rows} rows do not take {config}")
                off = self._chain.error(partial(_multiply, weight, config, gated), source, wanted[:rows], summing)
                found.add(rows, config, off)
            least = most + 1
        return found


def _multiply(weight: DenseWeight, config: GemmConfig, gated: bool, x: Tensor, out: Tensor) -> Tensor:
    if gated:
        return gemm.gemm(x, weight, config, True, out, activation="silu")
    return gemm.gemm(x, weight, config, True, out)
