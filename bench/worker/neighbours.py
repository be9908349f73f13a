"""`python -m bench.worker.neighbours`: measures the effect of a second worker on a host, and of a busy neighbour, with
default flags.

Replicas with default settings (a worker and a scheduler process each) answer a steady load of the demo model, one or
two of them at a time. They run as plain processes, in cgroups with a quota of one core each, and next to a process that
computes all the time on one core. Each arm is measured in several rounds, and the arms take turns. The table has the
output tokens per second of all replicas. Two replicas should together reach 0.85 of what one reaches on the same
machine. Cgroups need root.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass

from bench.harness.busy_process import BusyProcess
from bench.harness.cpu_quota import CpuQuota, Unavailable
from bench.harness.steady_replica import SteadyReplica
from quire.cli.output.terminal import table

WANTED = 0.85


@dataclass(frozen=True)
class Arm:
    """One arm. `of` is the arm with whose total this one is compared; `wanted` 0: there is no target."""

    name: str
    replicas: int
    quota: bool = False
    busy: bool = False
    of: str = ""


ARMS = (
    Arm("one worker", 1),
    Arm("two workers", 2, of="one worker"),
    Arm("two workers, a quota of one core each", 2, quota=True, of="one worker"),
    Arm("one worker, busy neighbour", 1, busy=True),
    Arm("two workers, busy neighbour", 2, busy=True, of="one worker, busy neighbour"),
)


@dataclass(frozen=True)
class Measured:
    """One run of an arm."""

    tokens_per_s: float
    cpu_share: float
    """Processor time of the workers, in cores."""


def main() -> int:
    """Run the benchmark. Returns 0 if all arms reach their targets."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="models/demo")
    parser.add_argument("--streams", type=int, default=16, help="requests that decode at each replica")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=8.0)
    arguments = parser.parse_args()
    arms = [arm for arm in ARMS if not arm.quota or _quotas()]
    found: dict[str, list[Measured]] = {arm.name: [] for arm in arms}
    for number in range(arguments.rounds):
        for arm in arms:
            measured = asyncio.run(run(arm, arguments.model, arguments.streams, arguments.seconds))
            found[arm.name].append(measured)
            print(f"round {number + 1}, {arm.name}: {measured.tokens_per_s:.0f} tok/s", file=sys.stderr)
    totals = {name: statistics.median(each.tokens_per_s for each in rounds) for name, rounds in found.items()}
    rows, short = [], []
    for arm in arms:
        share = totals[arm.name] / totals[arm.of] if arm.of else 1.0
        if share < WANTED:
            short.append(arm.name)
        cores = statistics.median(each.cpu_share for each in found[arm.name])
        rows.append([arm.name, f"{totals[arm.name]:.0f}", f"{cores:.2f}", f"{share:.2f}" if arm.of else ""])
    print(table(["arm", "tok/s", "cores of workers", "of one"], rows, right=range(1, 4)))
    for name in short:
        print(f"{name}: less than {WANTED} of one worker's total")
    return 1 if short else 0


async def run(arm: Arm, model: str, streams: int, seconds: float) -> Measured:
    """Start the arm's processes, warm up, measure, and end the processes."""
    with ExitStack() as processes:
        if arm.busy:
            processes.enter_context(BusyProcess())
        quotas = [processes.enter_context(CpuQuota(1.0)) if arm.quota else None for _ in range(arm.replicas)]
        starts = [processes.enter_context(SteadyReplica(model, quota.prefix if quota else ())) for quota in quotas]
        async with AsyncExitStack() as loads:
            replicas = [await loads.enter_async_context(replica.load(streams)) for replica in starts]
            await asyncio.sleep(min(3.0, seconds))
            before, cpu = [load.tokens for load in replicas], sum(r.worker.cpu_s() for r in starts)
            began = time.monotonic()
            await asyncio.sleep(seconds)
            elapsed = time.monotonic() - began
            tokens = sum(load.tokens for load in replicas) - sum(before)
            spent = sum(r.worker.cpu_s() for r in starts) - cpu
            return Measured(tokens / elapsed, spent / elapsed)


def _quotas() -> bool:
    try:
        with CpuQuota(1.0):
            return True
    except Unavailable as error:
        print(f"no cgroups: {error}", file=sys.stderr)
        return False


if __name__ == "__main__":
    sys.exit(main())
