"""Measures the time to the first token of one request after the other, through five services whose steps take no time.

    python -m bench.pipeline.first_token [--kinds ids text chat] [--prompts 512 1024] [--beside ../other/checkout]

Without a model, only the hops and the work of each service are left. There is one client with one connection, and all
prompts differ. The program prints the time until the first event, the time that the services report for their own work
on a request (queues included), and the rest, which is the hops. With `--beside`, the services of another checkout take
turns with these. On a machine with other work, this is the only fair comparison of two versions. If the turns change
with each request, all services find cold processor caches. `--in-row 40` gives each checkout 40 requests in a row, so
that their caches are as warm as those of services that have a machine for themselves. With `--kvstore`, prompts, which
are all new, are looked up and stored in a kvstore, as the services do by default.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from bench import ROOT
from bench.harness.checkout_services import start_services

MODEL = ROOT / "models" / "demo"
TOKENS = 2  # the second shows that the first was not kept back for the end
WARM_UP = 20
FLAGS: dict[str, dict[str, str | bool]] = {
    "worker": {"paced": "0", "block-size": "64", "served-model-name": "m"},
    "scheduler": {"max-num-batched-tokens": "8192"},
}
NO_CACHES: dict[str, str | bool] = {"enable-prefix-caching": False, "kvstore-min-tokens": "1000000"}


class Prompts:
    """Prompts of random words, so that each token is one that text may have."""

    def __init__(self, seed: int = 0) -> None:
        self._tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
        self._rng = np.random.default_rng(seed)
        each = [self._tokenizer.decode([token]) for token in range(self._tokenizer.get_vocab_size())]
        self._words = [word for word in each if word.startswith(" ") and word.strip().isalpha()]

    def request(self, kind: str, length: int) -> bytes:
        """Return an HTTP request with about this many tokens."""
        ids = self._tokenizer.encode("".join(self._rng.choice(self._words, length)), add_special_tokens=False).ids
        body: dict[str, Any] = {
            "model": "m",
            "max_tokens": TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        if kind == "ids":
            body["prompt"] = ids[:length]
        elif kind == "text":
            body["prompt"] = self._tokenizer.decode(ids[:length])
        else:
            body["messages"] = [{"role": "user", "content": self._tokenizer.decode(ids[:length])}]
        raw = json.dumps(body).encode()
        path = "/v1/chat/completions" if kind == "chat" else "/v1/completions"
        head = f"POST {path} HTTP/1.1\r\nHost: m\r\nContent-Type: application/json\r\nX-Quire-Timings: 1\r\n"
        return f"{head}Content-Length: {len(raw)}\r\n\r\n".encode() + raw


class Client:
    """A client with one connection that is kept alive."""

    def __init__(self, url: str) -> None:
        host, port = url.removeprefix("http://").rsplit(":", 1)
        self._socket = socket.create_connection((host, int(port)))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def ask(self, request: bytes) -> tuple[float, list[dict[str, Any]]]:
        """Send a request. Returns the microseconds to the first event, and the times that the services report."""
        answer, first_ns = b"", 0
        began_ns = time.monotonic_ns()
        self._socket.sendall(request)
        while not answer.endswith(b"0\r\n\r\n"):
            chunk = self._socket.recv(65536)
            if not first_ns and b"data: {" in chunk:
                first_ns = time.monotonic_ns()
            answer += chunk
            if not chunk or not answer.startswith(b"HTTP/1.1 200"):
                raise RuntimeError(answer.decode())
        events = [json.loads(line[6:]) for line in answer.split(b"\n") if line.startswith(b"data: {")]
        return (first_ns - began_ns) / 1e3, next(event["quire_timings"] for event in events if "quire_timings" in event)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", default=["ids", "text"], choices=("ids", "text", "chat"))
    parser.add_argument("--prompts", nargs="+", type=int, default=[512, 1024])
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--gap-ms", type=float, default=10.0, help="pause before each request")
    parser.add_argument("--in-row", type=int, default=1, help="requests to one checkout before the turn of the next")
    parser.add_argument("--kvstore", action="store_true", help="look prompts up, and store them")
    parser.add_argument("--beside", type=Path, nargs="*", default=[], help="other checkouts, their stubs generated")
    options = parser.parse_args()
    checkouts = [ROOT, *(path.resolve() for path in options.beside)]
    took: dict[tuple[str, int, Path], list[float]] = defaultdict(list)
    work: dict[tuple[str, int, Path], list[dict[str, float]]] = defaultdict(list)
    with contextlib.ExitStack() as stack:
        flags = FLAGS if options.kvstore else {**FLAGS, "scheduler": {**FLAGS["scheduler"], **NO_CACHES}}
        clients = {}
        for path in checkouts:
            services = stack.enter_context(start_services(path, "first-token", MODEL, flags=flags))
            clients[path] = Client(services.http)
        prompts = Prompts()
        for turn in range(-(-WARM_UP // options.in_row) + -(-options.requests // options.in_row)):
            for kind in options.kinds:
                for length in options.prompts:
                    requests = [prompts.request(kind, length) for _ in range(options.in_row)]
                    for path in checkouts if turn % 2 else checkouts[::-1]:
                        for request in requests:
                            time.sleep(options.gap_ms / 1e3)
                            us, timings = clients[path].ask(request)
                            if turn * options.in_row >= WARM_UP:
                                took[kind, length, path].append(us)
                                work[kind, length, path].append(phases(timings))
    for (kind, length, path), each in took.items():
        print(f"{kind} {length}: {figures(each)} [{path.name}]")
        print(f"    {spans(each, work[kind, length, path])}")
    print(f"load average {os.getloadavg()[0]:.1f}")


def phases(timings: list[dict[str, Any]]) -> dict[str, float]:
    """Return the microseconds of each phase before the first token. For work on every token, count the share of one
    token."""
    later = ("total", "decode")
    return {
        f"{one['service']} {one['phase']}": one["us"] / (one["count"] if one["phase"] == "detokenize" else 1)
        for one in timings
        if one["phase"] not in later
    }


def figures(us: list[float]) -> str:
    return " ".join(f"p{percent} {np.percentile(us, percent):.0f}" for percent in (10, 50, 99)) + " us"


def spans(took: list[float], work: list[dict[str, float]]) -> str:
    """Return medians. The router's time to tokenize includes the tokenizer's time."""
    median = {name: float(np.median([one.get(name, 0.0) for one in work])) for name in work[0]}
    inside = sum(us for name, us in median.items() if name != "tokenizer encode")
    told = ", ".join(f"{name} {us:.0f}" for name, us in median.items())
    return f"{told}, the rest {np.median(took) - inside:.0f}"


if __name__ == "__main__":
    main()
