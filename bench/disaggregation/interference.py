"""`python -m bench.disaggregation.interference`: measures how long prompts that keep arriving slow down streams that
decode at the same time.

Three arms take turns, on paced workers whose steps take a given time, and longer for each prompt token. In the first
arm, no prompts arrive. In the second, prompts arrive at replicas that prefill and decode, in chunks. In the third,
prompts arrive at a stack with prefill and decode replicas. Both stacks have the same number of workers. Every token is
compared with the undisturbed answer.

With `--shape`, the workers are real, with random weights of that shape, each on its own GPU. Their tokens are not
compared, since other rows of a batch may decide a tie between two tokens. The benchmark prints a table, and adds an
entry to bench/LOG.md. On a busy machine other programs also cause gaps, but all arms run on the same machine, so
compare the arms with each other.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from bench import LOG
from bench.disaggregation.interference_load import Heard, LoadShape, SteadyLoad
from bench.gpu.model import write_config
from bench.gpu.shapes import SHAPES
from bench.harness.bench_log import BenchLog, LogEntry
from quire.bench.statistics import percentile
from quire.cli.output.terminal import table
from quire.local.spec import StackSpec
from quire.local.stack import LocalStack
from quire.models import find_model
from quire_worker.paced.facts import read_facts

WANTED = 1.25
_CONTEXT, _KV_BYTES = 16_384, 24 << 30
PREDICTION = "undisturbed 1, P/D <= 1.25, aggregated >= 2 of the undisturbed p99"


@dataclass(frozen=True)
class Arm:
    """One arm. `roles`: prefill and decode replicas, instead of the same number that do both."""

    name: str
    roles: bool
    disturbed: bool


ARMS = (Arm("undisturbed", True, False), Arm("aggregated", False, True), Arm("P/D", True, True))


@dataclass(frozen=True)
class Figures:
    """Medians of each round's percentiles over all rounds, in milliseconds."""

    p50: float
    p99: float
    worst: float
    first: float
    prompts: int
    wrong: int

    @classmethod
    def of(cls, rounds: list[Heard]) -> Figures:
        def middle(percent: float, what: str) -> float:
            return statistics.median(percentile(sorted(getattr(heard, what)), percent) for heard in rounds)

        return cls(
            middle(50, "gaps_ms"),
            middle(99, "gaps_ms"),
            middle(100, "gaps_ms"),
            middle(50, "first_ms"),
            sum(len(heard.first_ms) for heard in rounds),
            sum(heard.wrong for heard in rounds),
        )


def main() -> int:
    """Run the benchmark. Returns 0 if disaggregation keeps the gaps small and no token was wrong."""
    arguments = _parser().parse_args()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as alive:
        os.environ["QUIRE_STATE_DIR"] = folder
        model = find_model(None)
        if arguments.shape:
            model = write_config(Path(folder) / arguments.shape, SHAPES[arguments.shape], _CONTEXT)
        addresses = {roles: _start(arguments, str(model), alive, roles=roles) for roles in (True, False)}
        heard: dict[str, list[Heard]] = {arm.name: [] for arm in ARMS}
        facts = read_facts(str(model))
        for number in range(arguments.rounds):
            for arm in ARMS:
                every_s = arguments.every_ms / 1e3 if arm.disturbed else 0.0
                shape = LoadShape(
                    arguments.streams, arguments.prompt_tokens, every_s, arguments.ramp_s, arguments.seconds
                )
                # No prompt is asked twice: nothing of it is in a cache.
                seed = (arguments.seed, number, ARMS.index(arm))
                load = SteadyLoad(addresses[arm.roles], shape, facts, seed, compared=not arguments.shape)
                found = asyncio.run(load.run())
                heard[arm.name].append(found)
                print(f"round {number + 1}, {arm.name}: p99 {Figures.of([found]).p99:.1f} ms", file=sys.stderr)
    figures = {name: Figures.of(rounds) for name, rounds in heard.items()}
    print(show(figures))
    if arguments.log:
        BenchLog(LOG).put(log_entry(arguments, figures))
    ratio = figures["P/D"].p99 / figures["undisturbed"].p99
    return 0 if ratio <= WANTED and not any(each.wrong for each in figures.values()) else 1


def show(figures: dict[str, Figures]) -> str:
    """Print the figures for people."""
    calm = figures["undisturbed"].p99
    rows = [
        [
            name,
            f"{f.p50:.1f}",
            f"{f.p99:.1f}",
            f"{f.p99 / calm:.2f}",
            f"{f.worst:.1f}",
            str(f.prompts),
            f"{f.first:.0f}",
        ]
        for name, f in figures.items()
    ]
    header = ["arm", "gap p50 ms", "p99 ms", "of undisturbed", "longest ms", "prompts", "their first token ms"]
    wrong = sum(each.wrong for each in figures.values())
    return f"{table(header, rows, right=range(1, 7))}\n\n{wrong} answers with wrong tokens"


def log_entry(arguments: argparse.Namespace, figures: dict[str, Figures]) -> LogEntry:
    """Return the entry for bench/LOG.md."""
    calm = figures["undisturbed"].p99
    each = "; ".join(f"{name} {f.p50:.1f} / {f.p99:.1f} ({f.p99 / calm:.2f} x)" for name, f in figures.items())
    long = [f for f in figures.values() if f.prompts]
    steps = (
        f"random weights of {arguments.shape}, a GPU each"
        if arguments.shape
        else f"steps of {arguments.step_ms:g} ms, {arguments.prefill_us:g} us a prompt token"
    )
    told = (
        f"`bench.disaggregation.interference`: gaps of {arguments.streams} streams ({steps}, "
        f"pages of {arguments.page_tokens}) while a prompt of "
        f"{arguments.prompt_tokens} arrives every {arguments.every_ms:g} ms, {arguments.rounds} rounds of "
        f"{arguments.seconds:g} s, {workers(arguments)}"
    )
    result = (
        f"p50 / p99 ms: {each}; {sum(f.prompts for f in long)} prompts, their first token after "
        f"{' and '.join(f'{f.first:.0f}' for f in long)} ms; {sum(f.wrong for f in figures.values())} wrong"
    )
    cpu = f"{os.cpu_count()} vCPU, load average {os.getloadavg()[0]:.0f}"
    return LogEntry(told, PREDICTION, result, cpu)


def workers(arguments: argparse.Namespace) -> str:
    """How many of which."""
    together = arguments.prefill + arguments.decode
    return f"{together} replicas, or {arguments.prefill} prefill and {arguments.decode} decode"


def _start(arguments: argparse.Namespace, model: str, alive: ExitStack, *, roles: bool) -> str:
    prefill, decode = (arguments.prefill, arguments.decode) if roles else (0, 0)
    worker: dict[str, str | bool] = {"max-num-seqs": "64", "block-size": str(arguments.page_tokens)}
    if arguments.shape:
        # Both stacks' workers share the GPUs; those of one run while the others rest.
        worker |= {"device": "cuda", "load-format": "dummy", "kv-cache-memory-bytes": str(_KV_BYTES)}
    else:
        worker |= {
            "paced": f"{arguments.step_ms:g}",
            "paced-prefill-us-per-token": f"{arguments.prefill_us:g}",
        }
    spec = StackSpec(
        f"interference-{'pd' if roles else 'both'}",
        model,
        replicas=0 if roles else arguments.prefill + arguments.decode,
        prefill=prefill,
        decode=decode,
        keep_directory=False,
        drain_timeout_s=5.0,
        flags={
            "worker": worker,
            # On one machine the kvstore would have a share of the cores that the others are measured on.
            "scheduler": {"kvstore-offload": "off"},
        },
    )
    stack = LocalStack(spec)
    alive.callback(stack.close)
    return stack.grpc


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.disaggregation.interference", description=__doc__)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, default=4096)
    parser.add_argument("--every-ms", type=float, default=400.0, help="between two prompts")
    parser.add_argument("--step-ms", type=float, default=25.0)
    parser.add_argument("--prefill-us", type=float, default=50.0, help="more for each prompt token of a step")
    parser.add_argument("--page-tokens", type=int, default=64, help="as on a GPU; moving a page takes some CPU time")
    parser.add_argument("--shape", choices=list(SHAPES), help="random weights of this shape, on GPUs")
    parser.add_argument("--prefill", type=int, default=1, help="prefill replicas")
    parser.add_argument("--decode", type=int, default=1, help="decode replicas")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ramp-s", type=float, default=4.0)
    parser.add_argument("--seconds", type=float, default=15.0, help="that are measured, of each round")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--log", action=argparse.BooleanOptionalAction, default=True, help="add an entry to bench/LOG.md"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
