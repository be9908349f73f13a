"""Measures the CPU time of the scheduler's core per step of steady decode: it applies a Report and makes the next
Grant.

    python -m bench.scheduler.core_step [--rows 256 --steps 1024 --starts 12 --rounds 4] [--tokens 3] [--kvstore]
                                        [--beside ../other/checkout]

There is no wire, no service and no worker. The benchmark makes the Reports, and measures the thread's own time. Page
allocation is included, once per page of steps. `--tokens`: the mean number of tokens of a row per step; neighbouring
rows differ. `--kvstore` stores all computed pages; each store ends before the next Report. With `--beside`, a process
of each checkout measures in turn, and both are started several times, since a process may be some per cent slower than
another of the same code. The ratio of their times has bounds of 95 % by bootstrap over the starts.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray

# This file runs with another checkout on the path too: nothing of `bench` is imported, which it may lack.
from quire_common.credit import Epoch, KvGroup, ModelInfo, PageGeometry, PageMove, Report, WorkerHello
from quire_common.sequence import RequestContext, Sequence, Stop
from quire_scheduler.config import SchedulerConfig
from quire_scheduler.core.scheduler import Scheduler

ROOT = Path(__file__).resolve().parents[2]
SERVICES = ("common", "scheduler")
PAGE_SIZE, VOCABULARY = 16, 32000
WARM_UP_STEPS = 64


def step_us(rows: int, steps: int, tokens: int, *, kvstore: bool) -> float:
    """Return the mean microseconds of CPU per step of a new core whose `rows` sequences all decode."""
    length = 2 * tokens * (WARM_UP_STEPS + steps) + 8 * PAGE_SIZE
    hello = worker_hello(rows, rows * (length // PAGE_SIZE + 8), length + 4 * PAGE_SIZE, tokens)
    core, now = Scheduler(SchedulerConfig(), hello, kvstore=kvstore), time.time()
    for handle in range(rows):
        prompt = np.random.default_rng(handle).integers(2, VOCABULARY, PAGE_SIZE + handle % PAGE_SIZE, np.int32)
        core.submit(0, handle, RequestContext("r"), Sequence(prompt, Stop(length), skip_cache_read=True), now)
    grant = core.next_grant(now)
    if grant is None or len(grant.start) != rows:
        raise RuntimeError("not all sequences were started at once")
    slots = np.array([start.slot for start in grant.start], np.int32)
    seq, spent_s = grant.seq, 0.0
    for step in range(WARM_UP_STEPS + steps):
        counts = row_counts(rows, step, tokens)
        report = decode_step(hello.epoch, step + 1, seq, slots, counts, [] if grant is None else grant.move)
        began_s = time.thread_time()
        core.on_report(report, now)
        grant = core.next_grant(now)
        spent_s += (time.thread_time() - began_s) * (step >= WARM_UP_STEPS)
        seq = seq if grant is None else grant.seq
    return spent_s / steps * 1e6


def row_counts(rows: int, step: int, tokens: int) -> NDArray[np.int32]:
    """Return the tokens of each row of a step: `tokens` in the mean. If that is more than one, each row gets one more
    or one less in turn. Rows that were held are not reported."""
    counts = np.full(rows, tokens, np.int32)
    if tokens > 1:
        counts[step % 3 :: 3] -= 1
        counts[(step + 1) % 3 :: 3] += 1
    return counts


def worker_hello(rows: int, num_pages: int, max_model_len: int, tokens: int) -> WorkerHello:
    """Return the hello of a worker with room for the rows, which may yield up to `tokens` + 1 tokens if `tokens` is
    more than one."""
    group = KvGroup("g0", 64, "kv_head.layer.kv.token.dim", "float32", 1, 1, 4)
    geometry = PageGeometry(PAGE_SIZE, (group,), b"ns")
    model = ModelInfo("m", "Model", max_model_len, VOCABULARY, (1,), b"d" * 32, geometry)
    hello = WorkerHello(Epoch(7, 1), rows * 5 // 2, rows, (num_pages,), model, ("cpu",))
    # A checkout whose rows draw one token alone does not know the field.
    return hello if tokens == 1 else replace(hello, max_row_tokens=tokens + 1)


def decode_step(
    epoch: Epoch, step: int, seq: int, slots: NDArray[np.int32], counts: NDArray[np.int32], moved: list[PageMove]
) -> Report:
    """Return a Report that brings each slot this many tokens, and the ends of moves."""
    return Report(
        epoch,
        first_step=step,
        retired=seq,
        step_applied=np.array([seq], np.int64),
        step_rows=np.array([len(slots)], np.int32),
        step_prefill_tokens=np.zeros(1, np.int32),
        slot=slots,
        count=counts,
        token=np.full(int(counts.sum()), 5, np.int32),
        finish=np.zeros(len(slots), np.uint8),
        moved_id=np.array([move.id for move in moved], np.int64),
        moved_status=np.zeros(len(moved), np.uint8),
        moved_pages=np.array([len(move.hashes) for move in moved], np.int32),
        moved_us=np.full(len(moved), 500, np.int32),
        running=len(slots),
    )


def answer(rows: int, steps: int, tokens: int, *, kvstore: bool) -> None:
    """Measure once for every line of the standard input."""
    for _ in sys.stdin:
        print(step_us(rows, steps, tokens, kvstore=kvstore), flush=True)


@contextlib.contextmanager
def measuring(
    checkout: Path, flags: list[str], program: str = __file__, services: tuple[str, ...] = SERVICES
) -> Iterator[tuple[IO[str], IO[str]]]:
    """Run a process of this program with a checkout's services on its path. Yields its input and its output."""
    folders = [checkout, *(checkout / "services" / name for name in services)]
    inherited = os.environ.get("PYTHONPATH", "")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*map(str, folders), inherited])}
    command = [sys.executable, "-P", program, "--answer", *flags]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as child:
        if child.stdin is None or child.stdout is None:
            raise RuntimeError("the process has no pipes")
        yield child.stdin, child.stdout
        child.stdin.close()


def ask_by_turns(children: Mapping[Path, tuple[IO[str], IO[str]]], order: list[Path], rounds: int) -> dict[Path, float]:
    """Ask the processes of `measuring` in turn, in this order and in reverse. Returns the median of each one's rounds,
    without the first, which warms up."""
    answers: dict[Path, list[float]] = {path: [] for path in order}
    for number in range(1 + rounds):
        for path in order if number % 2 else order[::-1]:
            ask, told = children[path]
            print(file=ask, flush=True)
            us = float(told.readline())
            if number:
                answers[path].append(us)
    return {path: float(np.median(each)) for path, each in answers.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--steps", type=int, default=1024)
    parser.add_argument("--starts", type=int, default=12, help="processes of each checkout, one after the other")
    parser.add_argument("--rounds", type=int, default=4, help="of each process, after one that warms up")
    parser.add_argument("--tokens", type=int, default=1, help="that a row draws in a step, in the mean")
    parser.add_argument("--kvstore", action="store_true", help="store all that is computed")
    parser.add_argument("--answer", action="store_true", help="measure when asked by the standard input")
    parser.add_argument("--beside", type=Path, nargs="*", default=[], help="other checkouts, their stubs generated")
    options = parser.parse_args()
    if options.answer:
        answer(options.rows, options.steps, options.tokens, kvstore=options.kvstore)
        return
    flags = ["--rows", str(options.rows), "--steps", str(options.steps), "--tokens", str(options.tokens)]
    flags += ["--kvstore"] if options.kvstore else []
    checkouts = [ROOT, *(path.resolve() for path in options.beside)]
    took: dict[Path, list[float]] = defaultdict(list)
    for start in range(options.starts):
        with contextlib.ExitStack() as stack:
            children = {path: stack.enter_context(measuring(path, flags)) for path in checkouts[:: 1 - 2 * (start % 2)]}
            for path, us in ask_by_turns(children, checkouts, options.rounds).items():
                took[path].append(us)
    for path, each in took.items():
        spread = f"{np.median(each):.1f} us a step ({min(each):.1f}-{max(each):.1f})"
        print(f"{options.rows} rows x {options.tokens}: median {spread} [{path.name}]")
    for path in checkouts[1:]:
        print(f"beside {path.name}: {ratio(took[ROOT], took[path])}")
    print(f"load average {os.getloadavg()[0]:.1f}")


def ratio(mine: list[float], other: list[float]) -> str:
    """Return the geometric mean of the starts' ratios, with its bounds of 95 %."""
    logs = np.log(np.array(mine) / np.array(other))
    drawn = logs[np.random.default_rng(0).integers(0, len(logs), (4000, len(logs)))].mean(1)
    low, high = np.exp(np.quantile(drawn, (0.025, 0.975)))
    return f"{np.exp(logs.mean()):.3f} ({low:.3f}-{high:.3f})"


if __name__ == "__main__":
    main()
