"""Measures what a client receives when the engine is faster than a router process: five services with a paced worker.

    python -m bench.pipeline.fast_engine --pace-ms 3 10 --streams 256 --tokens 256 --turns 3

The program prints a JSON line per turn. It has the time per token (`tpot_ms`; `decode_tpot_ms` while all requests
decode), which equals the pace if the services keep up. It also has the events per second, and the CPU time per token of
each service and of the load generator. At 3 ms, a router process cannot write an event for each token of 256 streams.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from bench import ROOT
from bench.gpu.http_load import HttpLoad
from bench.pipeline.services_arm import cpu_seconds, cpu_us_per_token
from quire.local.spec import StackSpec
from quire.local.stack import LocalStack

MODEL = ROOT / "models" / "demo"
PROMPT = 32


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pace-ms", type=float, nargs="+", default=[3.0])
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument(
        "--spread", type=float, default=0.0, help="lengths differ by this share; four times the requests"
    )
    options = parser.parse_args()
    for pace in options.pace_ms:
        flags: dict[str, dict[str, str | bool]] = {
            "worker": {"paced": str(pace), "block-size": "64", "max-num-seqs": str(options.streams)},
            "scheduler": {"kvstore-min-tokens": "1000000", "enable-prefix-caching": False},
            "router": {"max-concurrent-requests": "4096"},
        }
        spec = StackSpec("fast-engine", str(MODEL), flags=flags)
        with tempfile.TemporaryDirectory() as folder, contextlib.closing(LocalStack(spec)) as stack:
            for turn in range(options.turns):
                load = HttpLoad(options.streams, PROMPT, options.tokens, seed=turn, counted=True)
                if options.spread:  # requests come and go all the time
                    more = {"requests": 4 * options.streams, "concurrency": options.streams}
                    load = replace(load, **more, spread=options.spread)
                print(json.dumps({"pace_ms": pace, **measure(stack, load, Path(folder))}), flush=True)
    return 0


def measure(stack: LocalStack, load: HttpLoad, folder: Path) -> dict[str, object]:
    """Run one turn."""
    before, tokens = cpu_seconds(stack), load.requests * load.output_len
    found = load.put(stack.ready.http, folder)
    used = cpu_us_per_token(before, cpu_seconds(stack), tokens)
    return {
        "tpot_ms": round(found["median_tpot_ms"], 2),
        "decode_tpot_ms": round(found.get("median_decode_tpot_ms", 0.0), 2),  # 0: they never all decoded
        "output_tok_s": round(found["output_throughput"]),
        "cpu_us_per_token": {service: round(each, 1) for service, each in used.items()},
        "load_generator_cpu_s": round(found["load_generator_cpu_s"], 2),
    }


if __name__ == "__main__":
    sys.exit(main())
