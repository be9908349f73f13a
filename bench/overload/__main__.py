"""`python -m bench.overload`: measures admitted requests while four times as many arrive as a replica can serve.

    python -m bench.overload [--seconds 60] [--max-queue-wait-s 0.02] [--no-log]

A paced worker runs `--rows` sequences at once, in steps of a given time. So the capacity is known: rows / step time in
tokens per second. Clients are an open loop, with Poisson arrivals and without retries. These arms run on one stack:

- 0.9 of the capacity
- four times the capacity, then half of it
- four keys with half of the capacity alone, then with a key that floods at four times the capacity and whose
  `max_concurrent` is a quarter of the rows, then with a flooding key without that limit

The program prints tables, reports which requirements held, and adds an entry to bench/LOG.md. Figures count only if no
process takes more than 60 % of a core, and nothing else runs on the machine. Otherwise first tokens wait for a core.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

from bench import LOG
from bench.harness.bench_log import BenchLog, LogEntry
from bench.overload.load import Heard, Stream, cpu_shares, run_streams
from bench.pipeline.services_arm import cpu_seconds
from quire.bench.target import BACKENDS, Target
from quire.cli.output.terminal import table
from quire.local.spec import StackSpec
from quire.local.stack import LocalStack
from quire.models import find_model

OVERLOAD, CALM, OTHERS = 4.0, 0.9, 0.5
MOST_CORE = 0.6
PREDICTION = (
    "p99 of the first token at 4 x capacity <= 1.5 of that at 0.9; goodput >= 0.9 of the capacity; all others get 429 "
    "or 503, p99 within 100 ms; recovery < 2 s; beside a flooding key with max_concurrent the others' p99 <= 1.2 of "
    "that alone and 0.05 of them are refused at most, without max_concurrent more"
)
_STEADY_KEYS = ("steady-1", "steady-2", "steady-3", "steady-4")
_PAUSE_S = 3.0


@dataclass
class Found:
    """The streams of all arms by name, and the share of a core that each process used in the overload."""

    heard: dict[str, Heard] = field(default_factory=dict)
    cores: dict[str, float] = field(default_factory=dict)


def main() -> int:
    """Run the benchmark. Returns 0 if all requirements held."""
    options = _parser().parse_args()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as alive:
        os.environ["QUIRE_STATE_DIR"] = folder
        load_before = os.getloadavg()[0]
        stack = _start(options, Path(folder), alive)
        found = measure(options, stack)
    print(show(found))
    verdicts = judge(options, found)
    print("\n".join(f"{'held' if held else 'MISSED'}: {text}" for text, held in verdicts))
    if options.log:
        BenchLog(LOG).put(log_entry(options, found, verdicts, load_before))
    return 0 if all(held for _, held in verdicts) else 1


def capacity(options: argparse.Namespace) -> float:
    """Return how many requests per second the worker can serve."""
    return float(options.rows / (options.step_ms / 1e3 * options.tokens))


def measure(options: argparse.Namespace, stack: LocalStack) -> Found:
    """Run all arms, one after the other."""
    requests_per_s, seconds = capacity(options), options.calm_s
    # With token ids, each token has an event: of made-up tokens, some are no text without the next one.
    body = {"ignore_eos": True, "return_token_ids": True}
    target = Target(stack.ready.http, BACKENDS["openai"], chat=False, model="paced", body=body)
    flood, calm_key = OVERLOAD * requests_per_s, _STEADY_KEYS[0]
    each = OTHERS * requests_per_s / len(_STEADY_KEYS)
    others = [Stream(name, name, each, seconds) for name in _STEADY_KEYS]
    arms = {
        "warm": [Stream("warm", calm_key, CALM * requests_per_s, 5.0)],
        "calm": [Stream("calm", calm_key, CALM * requests_per_s, seconds)],
        "overload": [
            Stream("overload", calm_key, flood, options.seconds),
            Stream("after", calm_key, OTHERS * requests_per_s, 15.0, options.seconds),
        ],
        "alone": others,
        "limited": [*others, Stream("flood", "limited", flood, seconds)],
        "unlimited": [*others, Stream("flood", "unlimited", flood, seconds)],
    }
    found = Found()
    for number, (arm, streams) in enumerate(arms.items()):
        before = {**cpu_seconds(stack), "clients": time.process_time()}
        began_s = time.perf_counter()
        heard = run_streams(target, streams, options.tokens, options.seed * 100 + number)
        after = {**cpu_seconds(stack), "clients": time.process_time()}
        if arm == "overload":
            found.cores = cpu_shares(before, after, began_s)
        steady = [heard.pop(name) for name in _STEADY_KEYS if name in heard and len(streams) > 1]
        if steady:
            everybody = [outcome for each in steady for outcome in each.outcomes]
            heard["others"] = Heard(steady[0].begin_s, steady[0].end_s, everybody)
        found.heard |= {(f"{arm}: {name}" if name != arm else arm): each for name, each in heard.items()}
        print(f"{arm}: load average {os.getloadavg()[0]:.1f}", file=sys.stderr)
        time.sleep(_PAUSE_S)
    del found.heard["warm"]
    return found


def judge(options: argparse.Namespace, found: Found) -> list[tuple[str, bool]]:
    """Return each requirement in words, with its figure, and whether it held."""
    heard = found.heard
    calm, over, alone = heard["calm"], heard["overload"], heard["alone: others"]
    ratio = over.first_token_ms(99) / calm.first_token_ms(99)
    goodput = over.tokens_per_s() / (options.rows / options.step_ms * 1e3)
    failures = [error for each in heard.values() for error in each.failures]
    recovery_s = heard["overload: after"].recovery_s(1.5 * calm.first_token_ms(99))
    beside, free = (
        heard[f"{arm}: others"].first_token_ms(99) / alone.first_token_ms(99) for arm in ("limited", "unlimited")
    )
    limited, unlimited = (heard[f"{arm}: others"].refused_share for arm in ("limited", "unlimited"))
    busiest = max(found.cores, key=found.cores.__getitem__)
    return [
        (f"p99 of the first token under overload {ratio:.2f} of that at {CALM} (<= 1.5)", ratio <= 1.5),
        (f"goodput {goodput:.3f} of the capacity (>= 0.9)", goodput >= 0.9),
        (f"refusals p99 after {over.refusal_ms(99):.0f} ms (<= 100)", over.refusal_ms(99) <= 100),
        (f"{len(failures)} other failures (0) {sorted(set(failures))[:3] if failures else ''}".strip(), not failures),
        (f"recovery {recovery_s:.2f} s (< 2)", recovery_s < 2),
        (f"p99 of others beside a flooding key with max_concurrent {beside:.2f} of that alone (<= 1.2)", beside <= 1.2),
        (f"of them refused {limited:.3f} (<= 0.05)", limited <= 0.05),
        (f"without max_concurrent p99 {free:.2f}, refused {unlimited:.3f} (> 0.05: the limit helps)", unlimited > 0.05),
        (
            f"busiest process: {busiest}, {found.cores[busiest]:.2f} of a core (<= {MOST_CORE})",
            found.cores[busiest] <= MOST_CORE,
        ),
    ]


def show(found: Found) -> str:
    """Print the figures for people."""
    rows = [
        [
            name,
            str(len(each.outcomes)),
            str(len(each.admitted)),
            str(len(each.refused)),
            str(len(each.failures)),
            f"{each.first_token_ms(50):.0f}",
            f"{each.first_token_ms(99):.0f}",
            f"{each.first_gap_ms(50):.0f}",
            f"{each.first_gap_ms(99):.0f}",
            f"{each.refusal_ms(99):.0f}",
            f"{each.tokens_per_s():.0f}",
        ]
        for name, each in found.heard.items()
    ]
    header = [
        "arm",
        "requests",
        "admitted",
        "refused",
        "failed",
        "first p50 ms",
        "p99",
        "to second p50",
        "p99",
        "refusal p99",
        "tok/s",
    ]
    cores = ", ".join(f"{name} {share:.2f}" for name, share in found.cores.items())
    return f"{table(header, rows, right=range(1, len(header)))}\n\nshares of a core: {cores}"


def log_entry(
    options: argparse.Namespace, found: Found, verdicts: list[tuple[str, bool]], load_before: float
) -> LogEntry:
    """Return the entry for bench/LOG.md."""
    what = (
        f"requests at {OVERLOAD:g} x the capacity, and a key that floods: `bench.overload`, {options.seconds:g} s, "
        f"{options.rows} rows, steps of {options.step_ms:g} ms, answers of {options.tokens} tokens as a mean "
        f"({capacity(options):.0f} requests/s), --max-queue-wait-s {options.max_queue_wait_s:g}, seed {options.seed}"
    )
    first = "; ".join(
        f"{name} {each.first_token_ms(50):.0f} / {each.first_token_ms(99):.0f}" for name, each in found.heard.items()
    )
    second = "; ".join(
        f"{name} {each.first_gap_ms(50):.0f} / {each.first_gap_ms(99):.0f}" for name, each in found.heard.items()
    )
    cores = ", ".join(f"{name} {share:.2f}" for name, share in found.cores.items())
    told = "; ".join(f"{'held' if held else '**missed**'}: {text}" for text, held in verdicts)
    machine = f"{os.cpu_count()} vCPU, load average {load_before:.1f} before, {os.getloadavg()[0]:.1f} after"
    return LogEntry(
        what,
        PREDICTION,
        f"{told}. First token p50 / p99 ms: {first}. From there to the second: {second}. Shares of a core: {cores}",
        machine,
    )


def _start(options: argparse.Namespace, folder: Path, alive: ExitStack) -> LocalStack:
    keys = folder / "keys.yaml"
    limits = dict.fromkeys((*_STEADY_KEYS, "unlimited"), "")
    limits["limited"] = f", max_concurrent: {max(1, options.rows // 4)}"
    entries = (f"- {{name: {k}, sha256: {sha256(k.encode()).hexdigest()}{limit}}}\n" for k, limit in limits.items())
    keys.write_text("keys:\n" + "".join(entries))
    flags: dict[str, dict[str, str | bool]] = {
        "worker": {
            "paced": f"{options.step_ms:g}",
            "max-num-seqs": str(options.rows),
            "served-model-name": "paced",
        },
        "scheduler": {"kvstore-offload": "off", "max-queue-wait-s": f"{options.max_queue_wait_s:g}"},
        "router": {"api-key-file": str(keys)},
    }
    spec = StackSpec("overload", str(find_model(None)), keep_directory=False, drain_timeout_s=5.0, flags=flags)
    stack = LocalStack(spec)
    alive.callback(stack.close)
    return stack


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.overload", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=64, help="sequences that decode at once")
    parser.add_argument("--step-ms", type=float, default=40.0)
    parser.add_argument("--tokens", type=int, default=40, help="of an answer, as a mean: half to one and a half of it")
    parser.add_argument("--max-queue-wait-s", type=float, default=0.02, help="the scheduler's flag; 0: no bound")
    parser.add_argument("--seconds", type=float, default=60.0, help="of the overload")
    parser.add_argument("--calm-s", type=float, default=30.0, help="of each other arm")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--log", action=argparse.BooleanOptionalAction, default=True, help="add an entry to bench/LOG.md"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
