"""Measures the time that the services add to a device of known speed: until the prompts of a burst are computed, and
for each decode step.

    python -m bench.pipeline.hops burst [--requests 32 --prompt 4096] [--beside ../other/checkout]
    python -m bench.pipeline.hops decode [--requests 1] [--beside ../other/checkout]

All requests start at once, each over its own connection, with a paced worker: by default as fast as a 0.6B model on an
H200, 2.7 us per prompt token and 0.7 ms per step. The requests of a burst ask for one token each. The program prints
the time until the last request has ended, the time that the device alone would need, and the CPU time of each service.
With `--beside`, the services of another checkout take turns with these, and the ratio of CPU time is printed with its
bounds. With `--kvstore`, prompts, which are all new, are looked up and stored in a kvstore, as the services do by
default.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import statistics
import time
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import uvloop

from bench import ROOT
from bench.harness.checkout_services import SOURCE_FOLDERS, start_services
from bench.pipeline.first_token import MODEL, NO_CACHES
from quire.bench.outcome import Outcome
from quire.bench.target import Target

VOCABULARY = 4000
_STEP_TOKENS = 16384


@dataclass(frozen=True)
class Round:
    """Milliseconds of one round, and microseconds of CPU time by service."""

    total: float
    first: float
    """Until the median request has its first token."""
    between: float
    """Of two tokens, by the median request."""
    cpu: Counter[str]


async def serve(url: str, bodies: list[bytes]) -> tuple[float, list[Outcome]]:
    """Run the requests. Returns when they began, and the outcome of each."""
    target = Target(url, "/v1/completions", chat=False, model="m")
    connections = [await target.connect() for _ in bodies]
    began_s = time.perf_counter()
    outcomes = [Outcome(sent_s=began_s) for _ in bodies]
    await asyncio.gather(*(c.send(b, o) for c, b, o in zip(connections, bodies, outcomes, strict=True)))
    for connection in connections:
        connection.close()
    if errors := [outcome.error for outcome in outcomes if outcome.error]:
        raise RuntimeError(errors[0])
    return began_s, outcomes


def measure(url: str, holder: int, bodies: list[bytes]) -> Round:
    """Start all requests at once, and measure them."""
    before = cpu_us(holder)
    began_s, outcomes = uvloop.run(serve(url, bodies))
    total = time.perf_counter() - began_s
    spent = cpu_us(holder)
    spent.subtract(before)
    gaps = [(one.last_s - one.first_s) / max(one.output_tokens - 1, 1) for one in outcomes]
    first = statistics.median(one.first_s - began_s for one in outcomes)
    return Round(total * 1e3, first * 1e3, statistics.median(gaps) * 1e3, spent)


def cpu_us(pid: int) -> Counter[str]:
    """Return the CPU time of each service below a process, since it began."""
    found: Counter[str] = Counter()
    command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    names = {f"quire_{name}".encode(): name for name in SOURCE_FOLDERS}
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it has ended meanwhile
            for name in names.keys() & set(command):
                found[names[name]] += int((task / "schedstat").read_text().split()[0]) // 1000
            for child in (task / "children").read_text().split():
                found.update(cpu_us(int(child)))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("burst", "decode"))
    parser.add_argument("--requests", type=int, help="at once; 32, or 1 that decodes")
    parser.add_argument("--prompt", type=int, help="tokens; 4096, or 128 before decoding")
    parser.add_argument("--output", type=int, help="tokens; 1, or 400 of decoding")
    parser.add_argument("--rounds", type=int, default=8, help="after one that warms up")
    parser.add_argument("--starts", type=int, default=1, help="of all services, each with so many rounds")
    parser.add_argument("--step-ms", type=float, help="0.7 where it decodes")
    parser.add_argument("--prefill-us", type=float, default=2.7, help="per prompt token")
    parser.add_argument("--kvstore", action="store_true", help="look prompts up, and store them")
    parser.add_argument("--beside", type=Path, nargs="*", default=[], help="other checkouts, their stubs generated")
    options = parser.parse_args()
    decode = options.what == "decode"
    requests = options.requests or (1 if decode else 32)
    prompt = options.prompt or (128 if decode else 4096)
    output = options.output or (400 if decode else 1)
    step_ms = options.step_ms or (0.7 if decode else 0.001)
    worker = {"paced": str(step_ms), "block-size": "64", "served-model-name": "m", "max-num-seqs": "512"}
    flags: dict[str, dict[str, str | bool]] = {
        "worker": {**worker, "paced-prefill-us-per-token": str(options.prefill_us)},
        "scheduler": {"max-num-batched-tokens": str(_STEP_TOKENS), **({} if options.kvstore else NO_CACHES)},
        "router": {"max-concurrent-requests": "4096"},
    }
    rng = np.random.default_rng(0)
    fields = {"temperature": 0, "ignore_eos": True}
    writer = Target("http://localhost", "/v1/completions", chat=False, model="m", body=fields)
    found: dict[Path, list[Round]] = defaultdict(list)
    checkouts = [ROOT, *(path.resolve() for path in options.beside)]
    for start in range(options.starts):
        with contextlib.ExitStack() as stack:
            served = {
                path: stack.enter_context(start_services(path, "hops", MODEL, flags=flags))
                for path in checkouts[:: 1 - 2 * (start % 2)]
            }
            for number in range(1 + options.rounds):
                prompts = [rng.integers(0, VOCABULARY, prompt).tolist() for _ in range(requests)]
                bodies = [writer.request(ids, output, f"{number}-{index}") for index, ids in enumerate(prompts)]
                for path in checkouts if number % 2 else checkouts[::-1]:
                    one = measure(served[path].http, served[path].pid, bodies)
                    if number:
                        found[path].append(one)
    alone = requests * prompt * options.prefill_us / 1e3 + (output - 1) * step_ms
    print(f"{requests} x {prompt} in, {output} out; the device alone: {alone:.0f} ms")
    for path, rounds in found.items():
        print(f"{figures(rounds)}; {cpu(rounds, output if decode else requests)} [{path.name}]")
    for path in checkouts[1:]:
        print(f"CPU beside {path.name}: {ratios(found[ROOT], found[path], options.starts)}")
    print(f"load average {os.getloadavg()[0]:.1f}")


def figures(rounds: list[Round]) -> str:
    totals = [one.total for one in rounds]
    told = f"{statistics.median(totals):.0f} ms ({min(totals):.0f}-{max(totals):.0f})"
    first, between = (statistics.median(getattr(one, name) for one in rounds) for name in ("first", "between"))
    return f"{told}, first token {first:.1f} ms, token to token {between:.3f} ms"


def cpu(rounds: list[Round], parts: int) -> str:
    """Return the CPU time by service, per request of a burst or per step."""
    spent: Counter[str] = Counter()
    for one in rounds:
        spent.update(one.cpu)
    return "CPU us " + ", ".join(f"{name} {us / len(rounds) / parts:.0f}" for name, us in spent.most_common() if us)


def ratios(rounds: list[Round], beside: list[Round], starts: int) -> str:
    """Return ratios of the services' CPU time, with bounds of 95 % by bootstrap over pairs of rounds. With several
    starts, the bootstrap samples whole starts, because a process may use some per cent more CPU than another of the
    same code."""
    rng, told = np.random.default_rng(0), []
    for name in SOURCE_FOLDERS[1:]:
        pairs = np.array([(one.cpu[name], other.cpu[name]) for one, other in zip(rounds, beside, strict=True)], float)
        units = pairs.reshape(starts, -1, 2).sum(1) if starts > 1 else pairs
        drawn = units[rng.integers(0, len(units), (4000, len(units)))].sum(1)
        if units[:, 1].all():
            low, high = np.quantile(drawn[:, 0] / drawn[:, 1], (0.025, 0.975))
            told.append(f"{name} {units[:, 0].sum() / units[:, 1].sum():.3f} ({low:.3f}-{high:.3f})")
    return ", ".join(told)


if __name__ == "__main__":
    main()
