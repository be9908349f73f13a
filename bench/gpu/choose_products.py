"""Chooses the kernel config of linear layers for each shape of a decode step: measures all candidates, and writes the
table.

`python -m bench.gpu.choose_products --out FILE` runs on the GPU. Each GEMM is timed under the conditions of a step: as
a captured chain over copies of the weight that together exceed the L2 cache. With `--table FILE`, only the entries of
`--products` ("8B o") and `--rows` are measured again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from collections.abc import Sequence as Listed
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.gpu.shapes import SHAPES, products_of
from bench.gpu.timing import chain_us
from quire_worker.ops.triton.gemm import GemmConfig, Gemv, Tall, gemm
from quire_worker.ops.weight import DenseWeight

Entry = dict[str, Any]
"""Of a table's file: rows, outputs, inputs, us, cublas_us, way."""
ROWS = (1, 2, 4, 8, 16, 32, 64)
COLD_BYTES = 400 << 20
SHARED_BYTES = 227 << 10
"""Of a program on Hopper."""
CORES = os.cpu_count() or 1


def candidates(rows: int, outputs: int, inputs: int) -> Iterator[GemmConfig]:
    """Return all candidates for a shape."""
    if rows <= 2:
        for block_n, block_k, warps in itertools.product((2, 4, 8, 16), (512, 1024, 2048), (4, 8)):
            if inputs % block_k == 0 and 2048 <= block_n * block_k * rows <= 16384:
                yield Gemv(block_n, block_k, warps)
    columns = max(16, rows)
    if rows > 1:
        for block_n, block_k, stages in itertools.product((64, 128), (64, 128), (3, 5, 8)):
            if inputs % block_k == 0 and outputs // block_n >= 32 and _fits(columns, block_n, block_k * stages):
                yield Tall(columns, block_n, block_k, 4, stages)
        if columns <= 32 and outputs < 32768:
            for block_n, block_k, shares, stages in itertools.product((16, 32), (64, 128), (4, 8), (2, 3, 4)):
                if inputs % (block_k * shares) == 0 and _fits(columns, block_n, block_k * shares * stages):
                    yield from (Tall(columns, block_n, block_k, warps, stages, shares) for warps in sorted({4, shares}))


def _fits(columns: int, block_n: int, inner: int) -> bool:
    """Whether bf16 tiles of both operands fit into shared memory together."""
    return (columns + block_n) * inner * 2 <= SHARED_BYTES


def cases(asked: Listed[str] = ()) -> list[tuple[str, str, int, int]]:
    """Return (model, product, outputs, inputs) of the named products, or of all."""
    every = [(name, role, *shape) for name, spec in SHAPES.items() for role, shape in products_of(spec).items()]
    return [case for case in every if not asked or f"{case[0]} {case[1]}" in asked]


def warm(part: int, parts: int, asked: Listed[str], row_counts: Listed[int]) -> None:
    """Compile a part of all candidates into the disk cache."""
    jobs = [(m, n, k, w) for _, _, n, k in cases(asked) for m in row_counts for w in candidates(m, n, k)]
    seen = set()
    for index, (rows, outputs, inputs, config) in enumerate(jobs):
        key = (rows if isinstance(config, Gemv) else 0, inputs, config)
        if key in seen:
            continue
        seen.add(key)
        if len(seen) % parts != part:
            continue
        weight = DenseWeight(torch.zeros(outputs, inputs, dtype=torch.bfloat16, device="cuda"))
        x = torch.zeros(rows, inputs, dtype=torch.bfloat16, device="cuda")
        for pdl in (False, True):
            try:
                gemm(x, weight, config, pdl)
            except Exception as error:  # too much shared memory, for one: it is left out below, too
                print(f"candidate {config} failed: {str(error)[:80]}", file=sys.stderr)
        del weight
        if index % 8 == 0:
            torch.cuda.empty_cache()


def main() -> None:
    """Compile in parallel, then measure one after the other."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--table", type=Path)
    parser.add_argument("--products", nargs="+", default=[], choices=[f"{case[0]} {case[1]}" for case in cases()])
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--warm", type=int, default=-1)
    args = parser.parse_args()
    if args.warm >= 0:
        warm(args.warm, CORES, args.products, args.rows)
        return
    begin = time.perf_counter()
    command = [sys.executable, "-m", "bench.gpu.choose_products", *sys.argv[1:], "--warm"]
    children = [subprocess.Popen([*command, str(i)]) for i in range(CORES)]
    for child in children:
        child.wait()
    print(f"compiled in {time.perf_counter() - begin:.0f} s", flush=True)
    table: list[Entry] = json.loads(args.table.read_text()) if args.table else []
    for case in cases(args.products):
        for entry in measure(*case, args.rows):
            put(table, entry)
        args.out.write_text("[\n" + ",\n".join(map(json.dumps, table)) + "\n]\n")
        torch.cuda.empty_cache()


def put(table: list[Entry], entry: Entry) -> None:
    """Put an entry into the table: in place of the one for the same shape, else after the entries with fewer rows of
    the same weight, else at the end."""
    shape = (entry["outputs"], entry["inputs"], entry["rows"])
    for at, known in enumerate(table):
        if (known["outputs"], known["inputs"], known["rows"]) == shape:
            table[at] = entry
            return
    like = [at for at, known in enumerate(table) if (known["outputs"], known["inputs"]) == shape[:2]]
    fewer = [at for at in like if table[at]["rows"] < entry["rows"]]
    table.insert(fewer[-1] + 1 if fewer else like[0] if like else len(table), entry)


def measure(model: str, role: str, outputs: int, inputs: int, row_counts: Listed[int] = ROWS) -> Iterator[Entry]:
    """Return the entries of one weight's shape, one per number of rows."""
    copies = max(2, min(28, COLD_BYTES // (outputs * inputs * 2)))
    make = partial(torch.randn, outputs, inputs, dtype=torch.bfloat16, device="cuda")
    weights = [DenseWeight(make() * 0.02) for _ in range(copies)]
    floor = outputs * inputs * 2 / 4.3e6
    for rows in row_counts:
        x = torch.randn(rows, inputs, dtype=torch.bfloat16, device="cuda")
        base = chain_us(lambda i, x=x: torch.nn.functional.linear(x, weights[i].data), copies)  # type: ignore[misc]  # a default in a lambda has no type
        best, chosen = base, None
        for config in candidates(rows, outputs, inputs):
            us = try_way(x, weights, config)
            if us < best:
                best, chosen = us, config
        print(
            f"{model} {role:8} M={rows:3} cublas {base:7.2f} best {best:7.2f} floor {floor:7.2f} {chosen}", flush=True
        )
        entry = None if chosen is None else {"kind": type(chosen).__name__, **asdict(chosen)}
        yield {
            "rows": rows,
            "outputs": outputs,
            "inputs": inputs,
            "us": round(best, 2),
            "cublas_us": round(base, 2),
            "way": entry,
        }


def try_way(x: torch.Tensor, weights: list[DenseWeight], config: GemmConfig) -> float:
    """Return the microseconds of one GEMM; infinite if the kernel is wrong or cannot run."""
    wanted = x.float() @ weights[0].data.float().T
    try:
        got = gemm(x, weights[0], config, pdl=False).float()
        if not bool((got - wanted).norm() <= 1e-2 * wanted.norm()):
            print("WRONG", config, flush=True)
            return math.inf
        return chain_us(lambda i: gemm(x, weights[i], config, pdl=True), len(weights))
    except Exception as error:  # too much shared memory, for one
        print("failed", config, str(error)[:60], flush=True)
        return math.inf


if __name__ == "__main__":
    main()
