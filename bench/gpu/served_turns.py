"""Measures rows of stage 6 through the services of two checkouts, by turns on one GPU.

    python -m bench.gpu.served_turns ../other/checkout [--model 0.6B] [--turns 3]

The services of both checkouts run at the same time, and each has a part of the GPU's memory for its KV pages. The load
generator is this checkout's. For the rows of the time between tokens, the figure is TPOT, which includes steps that
compute prompts of other requests. `decode_tpot` leaves these out, but an older checkout may not report the tokens of
each event. The program prints each figure as soon as it is measured, and in the end the ratio of the medians, this
checkout's over the other's.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch

from bench import ROOT
from bench.gpu.engine import CONTEXT
from bench.gpu.http_load import HttpLoad, stack_of
from bench.gpu.model import write_config
from bench.gpu.served_table import LOADS, SERVED
from bench.gpu.shapes import MODELS, SHAPES
from bench.harness.checkout_services import CheckoutServices, start_services

_REPORTED = {**SERVED, "itl_ms": SERVED["tpot_ms"]}
"""Figure of a row -> key in the report of `quire bench serve`."""
_STREAM = "one stream"
_KV_BYTES = {"0.6B": 46_000_000_000, "8B": 52_000_000_000}
"""Pages for 512 sequences of 768 tokens. Two such sets of services fit on an H200."""
_TINY_KV_BYTES = 1 << 27


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, help="another checkout, its stubs generated")
    parser.add_argument("--model", default="0.6B", choices=list(SHAPES))
    parser.add_argument("--turns", type=int, default=3, help="after one that warms up")
    parser.add_argument("--kv-bytes", type=int, default=0, help="of KV pages of each worker; 0: enough for all rows")
    options = parser.parse_args()
    rows = {each.row: (each.load, _REPORTED[each.figure]) for each in LOADS}
    rows[_STREAM] = HttpLoad(16, 512, 128, concurrency=1, warmups=1), _REPORTED["first_ms"]
    name, worker = options.model, dict[str, str | bool](device="cuda")
    kv_bytes = options.kv_bytes or _KV_BYTES[name]
    if not torch.cuda.is_available():  # shows that every row can be measured
        name, worker = "tiny", {"device": "cpu", "attention-backend": "torch", "max-num-seqs": "4"}
        kv_bytes = _TINY_KV_BYTES
        for row, (load, key) in rows.items():
            rows[row] = replace(load, requests=2, input_len=8, output_len=min(load.output_len, 40)), key
    worker |= {"load-format": "dummy", "kv-cache-memory-bytes": str(kv_bytes)}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        model = write_config(Path(folder) / name, MODELS[name], CONTEXT)
        flags = stack_of(model, worker).flags
        checkouts = [ROOT, options.other.resolve()]
        served = [stack.enter_context(start_services(path, "served-turns", model, flags=flags)) for path in checkouts]
        measure(rows, served, options.turns, Path(folder))


def measure(
    rows: dict[str, tuple[HttpLoad, str]], served: list[CheckoutServices], turns: int, folder: Path
) -> dict[str, float]:
    """In each turn, measure each row on both sets of services, with the same prompts, and print the figures. The set
    that is measured first alternates. The first turn warms up and does not count. Returns the ratio of the medians by
    row, the first set's over the second's."""
    found: dict[tuple[str, int], list[float]] = defaultdict(list)
    for turn in range(-1, turns):
        for number, (row, (load, key)) in enumerate(rows.items()):
            for which in (0, 1) if turn % 2 else (1, 0):
                value = replace(load, seed=(turn + 1) * len(rows) + number).put(served[which].http, folder)[key]
                if turn >= 0:
                    found[row, which].append(value)
                    print(f"turn {turn}, {row}, {('here', 'other')[which]}: {value:.5g}", flush=True)
    ratios = {row: median(found[row, 0]) / median(found[row, 1]) for row in rows}
    for row, ratio in ratios.items():
        here, other = (" ".join(f"{value:.5g}" for value in found[row, which]) for which in (0, 1))
        print(f"{row}, {rows[row][1]}: here {here}, other {other}, ratio {ratio:.3f}", flush=True)
    return ratios


if __name__ == "__main__":
    main()
