"""Chooses the kernel config of gated linear layers for each shape and number of rows, or two kernels if these are
faster.

`python -m bench.gpu.choose_gated --out FILE` runs on the GPU. It measures all candidates, and a GEMM and an activation
as two kernels, and writes the table. Each candidate is timed as a captured chain over copies of the weight that
together exceed the L2 cache. It runs for a tenth of a second, and the median counts, because a GPU at its power limit
is slower than in its first milliseconds.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.gpu.shapes import SHAPES, products_of
from bench.gpu.timing import chain_us
from quire_worker.ops.interface import HeadShape
from quire_worker.ops.triton.gated_gemm import GatedGemmConfig, gated_gemm
from quire_worker.ops.triton.gemm import GemmConfigs
from quire_worker.ops.triton.gemm_configs import configs_of
from quire_worker.ops.triton.triton_ops import TritonOps
from quire_worker.ops.weight import DenseWeight

Entry = dict[str, Any]
"""Of a table's file: rows, outputs, inputs, us, apart_us, way."""
ROWS = (128, 129, 192, 256, 512, 1024, 2048, 4096, 8192)
_COLD_BYTES = 300 << 20
_WARM_S = 0.1
# Less is no gain: what is measured differs by as much.
_GAIN = 0.98
_COMPILERS = 12


def candidates(programs: int) -> Iterator[GatedGemmConfig]:
    """Return all candidates, for a device with this number of multiprocessors."""
    for group in (8, 16):
        yield GatedGemmConfig(128, 128, 64, 8, 3, group, programs)
        yield GatedGemmConfig(128, 128, 64, 8, 4, group, programs)
    yield GatedGemmConfig(128, 64, 64, 4, 3, 8, 2 * programs)
    yield GatedGemmConfig(128, 64, 64, 8, 4, 8, programs)
    yield GatedGemmConfig(64, 128, 64, 4, 4, 8, programs)
    yield GatedGemmConfig(64, 64, 64, 4, 4, 8, 2 * programs)


def main() -> None:
    """Compile all candidates in parallel, then measure one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--rows", type=int, nargs="+", default=ROWS, help="a way holds up to the next of these: name what ends it"
    )
    args = parser.parse_args()
    table: list[Entry] = []
    ways = [*candidates(torch.cuda.get_device_properties(0).multi_processor_count)]
    for name, spec in SHAPES.items():
        outputs, inputs = products_of(spec)["gate_up"]
        ops = TritonOps(HeadShape.of(spec), torch.device("cuda"), GemmConfigs(configs_of(torch.cuda.get_device_name())))
        ops.pdl = True
        for entry in measure(name, ops, ways, outputs, inputs, args.rows):
            table.append(entry)
            args.out.write_text("[\n" + ",\n".join(map(json.dumps, table)) + "\n]\n")
        torch.cuda.empty_cache()


def measure(
    model: str, ops: TritonOps, ways: list[GatedGemmConfig], outputs: int, inputs: int, row_counts: list[int]
) -> Iterator[Entry]:
    """Return the entries of one weight's shape."""
    copies = max(2, math.ceil(_COLD_BYTES / (outputs * inputs * 2)))
    weights = [DenseWeight(_random(outputs, inputs) * 0.02) for _ in range(copies)]
    with ThreadPoolExecutor(_COMPILERS) as pool:
        list(pool.map(lambda config: error_of(_random(64, inputs), weights[0], config), ways))
    for rows in row_counts:
        x = _random(rows, inputs)
        # Not ops.gated_linear, which takes one kernel where a table has a config.
        apart = _timed_us(lambda i, x=x: ops.gated_activation(ops.linear(x, weights[i % copies]), "silu"), copies)
        best, chosen = apart * _GAIN, None
        for config in ways:
            if not error_of(x, weights[0], config) <= 1e-2:
                print("WRONG", config, flush=True)
                continue
            us = _timed_us(lambda i, x=x, config=config: gated_gemm(x, weights[i % copies].data, config, True), copies)
            print(f"{model} M={rows:5} {us:8.1f} us, apart {apart:8.1f} {config}", flush=True)
            if us < best:
                best, chosen = us, config
        yield {
            "rows": rows,
            "outputs": outputs,
            "inputs": inputs,
            "us": round(best if chosen else apart, 1),
            "apart_us": round(apart, 1),
            "way": None if chosen is None else asdict(chosen),
        }


def error_of(x: Tensor, weight: DenseWeight, config: GatedGemmConfig) -> float:
    """Return the error of the first rows relative to float32; infinite if the kernel cannot run or leaves a value
    out."""
    first = x[:256].float() @ weight.data.float().T
    gate, up = first.chunk(2, dim=-1)
    wanted = torch.nn.functional.silu(gate) * up
    y = torch.full((x.shape[0], gate.shape[1]), torch.nan, dtype=x.dtype, device=x.device)
    try:
        gated_gemm(x, weight.data, config, pdl=False, out=y)
    except Exception as error:  # too much shared memory, for one
        print("failed", config, str(error)[:60], flush=True)
        return math.inf
    return math.inf if bool(y.isnan().any()) else float((y[:256].float() - wanted).norm() / wanted.norm())


def _timed_us(run: Any, calls: int) -> float:
    """Return the median time after the kernel has run for this many seconds."""
    once = chain_us(run, calls, replays=1)
    enough = math.ceil(_WARM_S * 1e6 / (once * calls))
    return chain_us(run, calls, replays=max(6, enough))


def _random(rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns, dtype=torch.bfloat16, device="cuda")


if __name__ == "__main__":
    main()
