"""`python -m bench.pipeline`: compares the five services, the same worker in one process, and transformers, with the
same work.

The arms take turns, with one torch thread each: (1) 64 concurrent gRPC streams through the five services, (2) the same
with scheduler and worker in lockstep, (3) the scheduler core and the worker engine called directly in one process, (4)
transformers' batched `generate`, sorted by length. All are greedy, with lengths fixed by the workload's seed. The
program prints JSON. Ratios are of medians over the rounds, as is the processor time of each service per 1,000 output
tokens.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from dataclasses import asdict
from typing import Any

from bench import ROOT
from bench.harness.workload import Request, uniform
from quire.local.spec import StackSpec
from quire.local.stack import LocalStack

_KV_BYTES = 1 << 30
# The stack, free-running and in lockstep.
STACKS = ("services", "lockstep")
ARMS = (*STACKS, "inprocess", "transformers")
# Arms that are processes of their own.
_CHILDREN = {"inprocess": "bench.pipeline.inprocess_arm", "transformers": "bench.pipeline.transformers_arm"}
_RATIOS = (
    ("services", "lockstep"),
    ("services", "inprocess"),
    ("services", "transformers"),
    ("lockstep", "inprocess"),
    ("inprocess", "transformers"),
)
Round = dict[str, dict[str, Any]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=str(ROOT / "models" / "demo"))
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--prompt-len", type=int, nargs=2, default=(16, 256))
    parser.add_argument("--output-len", type=int, nargs=2, default=(32, 160))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=ARMS)
    arguments = parser.parse_args()
    requests = uniform(
        arguments.requests, tuple(arguments.prompt_len), tuple(arguments.output_len), (300, 4096), arguments.seed
    )
    rounds = [run_round(arguments, requests) for _ in range(arguments.rounds)]
    rates = {arm: [r[arm]["output_tokens_per_s"] for r in rounds] for arm in arguments.arms}
    medians = {arm: statistics.median(values) for arm, values in rates.items()}
    result: dict[str, object] = {
        "workload": {k: v for k, v in vars(arguments).items() if k not in ("model", "arms")},
        "output_tokens_per_s": {arm: {"median": round(medians[arm], 1), "rounds": rates[arm]} for arm in rates},
        "cpu_ms_per_1k_tokens": {arm: median_cpu([r[arm] for r in rounds]) for arm in arguments.arms if arm in STACKS},
        "rounds": rounds,
    }
    for above, below in _RATIOS:
        if above in medians and below in medians:
            result[f"{above}_over_{below}"] = round(medians[above] / medians[below], 3)
    print(json.dumps(result, indent=1))


def median_cpu(rounds: list[dict[str, Any]]) -> dict[str, float]:
    """Return the median CPU time by service, and the sum for router, tokenizer and scheduler."""
    names = rounds[0]["cpu_ms_per_1k_tokens"]
    by_service = {name: statistics.median(r["cpu_ms_per_1k_tokens"][name] for r in rounds) for name in names}
    front = statistics.median(r["front_cpu_ms_per_1k_tokens"] for r in rounds)
    return {**by_service, "router + tokenizer + scheduler": front}


def run_round(arguments: argparse.Namespace, requests: list[Request]) -> Round:
    """Run each arm once. Arms are separate processes and never run at the same time."""
    result: Round = {}
    for arm in arguments.arms:
        if arm in STACKS:
            result[arm] = services(arguments, requests, lockstep=arm == "lockstep")
        else:
            result[arm] = child(arm, arguments, requests)
        print(f"{arm}: {result[arm]['output_tokens_per_s']:.0f} output tok/s", file=sys.stderr)
    return result


def services(arguments: argparse.Namespace, requests: list[Request], *, lockstep: bool) -> dict[str, Any]:
    """Run the five services. torch has one thread. The kvstore never has a page, since prompts do not repeat."""
    from bench.pipeline import services_arm

    flags = {
        "worker": {
            "torch-threads": "1",
            "max-num-seqs": str(arguments.streams),
            "kv-cache-memory-bytes": str(_KV_BYTES),
        },
        "scheduler": {"max-waiting": "4096"},
    }
    commands = {name: (sys.executable, "-m", f"quire_{name}", "--lockstep") for name in ("scheduler", "worker")}
    spec = StackSpec("bench-pipeline", arguments.model, flags=flags, commands=commands if lockstep else {})
    stack = LocalStack(spec)
    try:
        services_arm.warm_up(stack, uniform(4, (8, 16), (4, 8), (300, 4096), seed=10_000))
        return services_arm.run(stack, requests, arguments.streams)
    finally:
        stack.close()


def child(arm: str, arguments: argparse.Namespace, requests: list[Request]) -> dict[str, Any]:
    """Run an arm that is a module of its own: it reads requests from standard input, and its last output line is
    JSON."""
    command = [sys.executable, "-m", _CHILDREN[arm], "--model", arguments.model, "--batch", str(arguments.streams)]
    done = subprocess.run(
        command, input=json.dumps([asdict(r) for r in requests]), capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{arm} failed:\n{done.stderr}")
    return dict(json.loads(done.stdout.strip().splitlines()[-1]))


if __name__ == "__main__":
    main()
