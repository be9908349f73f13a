"""How long a stack takes from its command to ready, and to the first token."""

from __future__ import annotations

import argparse
import time

from quire.cli.benches.engine import add_engine_arguments, at_least_one, open_llm
from quire.cli.benches.results import add_file_argument, finish

HELP = "seconds from nothing to ready, and to the first token"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments: how often to start, and the engine's options."""
    parser.add_argument("--num-iters", type=int, default=3, metavar="N", help="(default: %(default)s)")
    add_file_argument(parser)
    add_engine_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Start and end a stack --num-iters times, and print the seconds until it is ready and until the first token as
    JSON. The first start may have to read files from disk that later starts find in memory. Returns the exit code 0.
    Raises InvalidArgument with --address or for fewer than one iteration, and StartFailed if the stack does not get
    ready."""
    from quire.errors import InvalidArgument
    from quire.sampling_params import SamplingParams

    at_least_one(args, "num_iters")
    if args.address:
        raise InvalidArgument("BAD_VALUE", "A Quire at an address has started already.", "Leave out --address.")
    ready_s, first_s = list[float](), list[float]()
    for _ in range(args.num_iters):
        began = time.perf_counter()
        with open_llm(args) as llm:
            ready_s.append(time.perf_counter() - began)
            llm.generate("Hello", SamplingParams(max_tokens=1, temperature=0), use_tqdm=False)
            first_s.append(time.perf_counter() - began)
    return finish(
        args,
        {
            "num_iters": args.num_iters,
            "ready_s": ready_s,
            "first_token_s": first_s,
            "avg_ready_s": sum(ready_s) / len(ready_s),
            "avg_first_token_s": sum(first_s) / len(first_s),
        },
    )
