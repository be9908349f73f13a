"""Measures the tokens per second of one router process on one core, to many SSE streams, and the latency that it adds.

The real router is pinned to one core. Its scheduler emits tokens at a given rate, its tokenizer is real, and its
clients are raw; there is one event per token. The program tries the rates of `--rates` one after the other, each with
new processes:

    python -m bench.router.stream --rates 20000 40000 60000 --streams 256 --tokens 600 [--groups 16]

It prints a JSON line per rate: the received tokens per second, the events per token (below 1: deltas were joined, since
a process could not keep up), and the CPU time per token of router and tokenizer. It also prints p50 and p99 of the time
from the scheduler's emission of a token to the arrival of its event in the client's socket, including the scheduler's
own delays. With `--groups N`, the sequences form N groups that step in turn, instead of all at once.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from bench import ROOT
from bench.harness.process_cpu import cpu_s
from bench.harness.processes import until_healthy

MODEL = ROOT / "models" / "demo"
TEXT = "It was a bright morning in the town, and the people came out of their houses to see what the noise was about. "


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rates", type=float, nargs="+", default=[20_000, 40_000])
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=600)
    parser.add_argument("--groups", type=int, default=1)
    parser.add_argument("--path", default="/v1/completions")
    options = parser.parse_args()
    for rate in options.rates:
        with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
            print(json.dumps(measure(options, rate, Path(folder), stack)), flush=True)
    return 0


def measure(options: argparse.Namespace, rate: float, folder: Path, stack: contextlib.ExitStack) -> dict[str, Any]:
    ids = Tokenizer.from_file(str(MODEL / "tokenizer.json")).encode(TEXT, add_special_tokens=False).ids
    np.save(folder / "ids.npy", np.array(ids, np.int32))
    said = folder / "said.json"
    arguments = [f"--rate={rate}", f"--groups={options.groups}", f"--wait-for={options.streams}", f"--said={said}"]
    scheduler = start(stack, folder, "bench.router.stream_scheduler", *arguments, f"--tokens-file={folder / 'ids.npy'}")
    tokenizer = start(stack, folder, "quire_tokenizer", f"--model={MODEL}", "--listen=127.0.0.1:0", "--log-format=json")
    peers = [f"--schedulers={spoken(scheduler)}", f"--tokenizers={logged(tokenizer, 'address')}"]
    router = start(stack, folder, "quire_router", "--port=0", "--listen=127.0.0.1:0", *peers, "--log-format=json")
    url = logged(router, "url")
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(router.pid, {cores[-1]})
    until_healthy(url)
    run_clients(options, url, folder, "warm", 50)
    before = cpu_s(router.pid), cpu_s(tokenizer.pid), time.perf_counter()
    run_clients(options, url, folder, "s", options.tokens)
    router_s, tokenizer_s = cpu_s(router.pid) - before[0], cpu_s(tokenizer.pid) - before[1]
    scheduler.terminate()
    scheduler.wait(30)
    tokens = options.streams * options.tokens
    return {
        "rate": rate,
        "streams": options.streams,
        "groups": options.groups,
        "path": options.path,
        **timings(json.loads(said.read_text()), json.loads((folder / "heard-s.json").read_text()), tokens),
        "router_us_per_token": round(router_s / tokens * 1e6, 1),
        "tokenizer_us_per_token": round(tokenizer_s / tokens * 1e6, 1),
        "tokens_per_s_of_one_core": round(tokens / router_s),
        "load_average": round(os.getloadavg()[0], 1),
    }


def timings(said: dict[str, list[int]], heard: dict[str, list[int]], tokens: int) -> dict[str, Any]:
    """Return the latencies. Event i of a stream is token i if no deltas were joined; otherwise latencies mean nothing,
    and the result is None."""
    first = min(said[name][0] for name in heard)
    last = max(heard[name][-1] for name in heard)
    events = sum(len(heard[name]) for name in heard)
    late = [np.subtract(heard[name], said[name]) / 1e6 for name in heard if len(heard[name]) == len(said[name])]
    ms = np.concatenate(late) if late else np.array([np.nan])
    return {
        "tokens_per_s": round(tokens / ((last - first) / 1e9)),
        "events_per_token": round(events / tokens, 4),
        "unjoined_streams": len(late),
        "latency_ms_p50": round(float(np.percentile(ms, 50)), 2),
        "latency_ms_p99": round(float(np.percentile(ms, 99)), 2),
    }


class Member(subprocess.Popen[bytes]):
    """A process and the file with its output."""

    log: Path


def start(stack: contextlib.ExitStack, folder: Path, module: str, *arguments: str) -> Member:
    """Start a process. Its output goes to files, since it would block on a pipe that is not read."""
    path = folder / f"{module}.log"
    log = stack.enter_context(path.open("wb"))
    process = Member([sys.executable, "-m", module, *arguments], cwd=ROOT, stdout=log, stderr=log)
    process.log = path
    stack.callback(process.wait, 20)
    stack.callback(process.terminate)
    return process


def lines(process: Member) -> list[str]:
    found = process.log.read_text().splitlines()
    if process.poll() is not None:
        raise RuntimeError(f"it ended with {process.returncode}: {found[-5:]}")
    return found


def spoken(process: Member) -> str:
    """Return the first line of its output."""
    while not (found := lines(process)):
        time.sleep(0.02)
    return found[0]


def logged(process: Member, field: str) -> str:
    """Return a field of its log."""
    while True:
        for line in lines(process):
            if line.startswith("{") and line.endswith("}") and field in (record := json.loads(line)):
                return str(record[field])
        time.sleep(0.02)


def run_clients(options: argparse.Namespace, url: str, folder: Path, prefix: str, tokens: int) -> None:
    fixed = [f"--url={url}", f"--path={options.path}", f"--streams={options.streams}", f"--prefix={prefix}"]
    command = [sys.executable, "-m", "bench.router.stream_clients", *fixed, f"--tokens={tokens}"]
    subprocess.run([*command, f"--heard={folder / f'heard-{prefix}.json'}"], cwd=ROOT, check=True)


if __name__ == "__main__":
    sys.exit(main())
