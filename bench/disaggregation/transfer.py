"""Compares the transports that carry pages from one worker to another with memcpy, plain TCP and NIXL, in one run.

`python -m bench.disaggregation.transfer` prints JSON. For each page size:

    mb_s     medians over rounds: memcpy and raw_tcp (one process or two, nothing in between), nixl_tcp and nixl_shm
             where that package is installed; tcp, grpc and shm by real KV transfer agents of two workers
             (bench/disaggregation/transfer_arms.py
             says what begins and ends them), nixl likewise, by UCX_TLS of the environment; the first three also
             `_whole`, with the engines' copies between pool and ring
    share    tcp and grpc / raw_tcp, and shm / memcpy, of the same round: the median over rounds, the least and the most
    cpu_us   per page, of the process that exports and of the one that pulls

All arms but NIXL take turns within a round, in an order that changes from round to round. Nothing else may run on the
machine.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
from typing import Any, Protocol

import numpy as np

from bench.disaggregation.raw_nixl import TLS, RawNixlPair
from bench.disaggregation.transfer_arms import PeerArm
from bench.kvstore.pages import Bodies, Pages
from bench.kvstore.raw_tcp import RawTcpPair
from bench.kvstore.transport_arms import RingMemcpy
from quire_worker.kv_transfer.transports.registry import missing_package

# What each transport is to come near to.
FLOORS = {"tcp": "raw_tcp", "grpc": "raw_tcp", "shm": "memcpy"}
TRANSPORTS = ("tcp", "grpc", "shm")
_WARM = 2


class Arm(Protocol):
    """One way of moving a round's pages. Returns seconds."""

    def get(self, pages: Pages) -> float: ...

    def close(self) -> None: ...


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page-kib", type=int, nargs="+", default=[2048, 64])
    parser.add_argument("--mib", type=int, default=128, help="bytes of one round")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--transports", nargs="+", default=list(TRANSPORTS), choices=TRANSPORTS)
    parser.add_argument("--no-whole", action="store_true", help="leave out the engines' copies")
    options = parser.parse_args()
    sizes = {f"{kib}KiB": measure(kib << 10, options) for kib in options.page_kib}
    print(json.dumps({**vars(options), "load": os.getloadavg()[0], "sizes": sizes}))
    return 0


def measure(page_bytes: int, options: argparse.Namespace) -> dict[str, Any]:
    count = max((options.mib << 20) // page_bytes, 1)
    bodies = np.random.default_rng(0).integers(0, 256, (count, page_bytes), dtype=np.uint8)
    first = Pages.make(bodies, "first")
    with contextlib.ExitStack() as stack:
        arms = contestants(first, options, stack)
        seconds = contest(arms, bodies, options.rounds)
        cpu = {name: arm.cpu_us_per_page() for name, arm in arms.items() if isinstance(arm, PeerArm)}
    for config in (
        TLS if not missing_package("nixl") else ()
    ):  # its threads never rest: beside the others it would slow them down
        with contextlib.closing(RawNixlPair(config, first)) as pair:
            seconds |= contest({f"nixl_{config}": pair}, bodies, options.rounds)
    if not missing_package("nixl"):
        with contextlib.closing(PeerArm("nixl", first)) as arm:
            seconds |= contest({"nixl": arm}, bodies, options.rounds)
            cpu["nixl"] = arm.cpu_us_per_page()
    return {**report(seconds, count * page_bytes), "cpu_us": cpu}


def contest(arms: dict[str, Arm], bodies: Bodies, rounds: int) -> dict[str, list[float]]:
    """Seconds by arm and round. The first rounds do not count."""
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for number in range(_WARM + rounds):
        pages = Pages.make(bodies, f"{bodies.shape[1]}-{number}")
        for name in list(arms) if number % 2 else list(arms)[::-1]:
            took_s = arms[name].get(pages)
            if number >= _WARM:
                seconds[name].append(took_s)
    return seconds


def contestants(pages: Pages, options: argparse.Namespace, stack: contextlib.ExitStack) -> dict[str, Arm]:
    arms: dict[str, Arm] = {}

    def enter(name: str, arm: Arm) -> None:
        stack.callback(arm.close)
        arms[name] = arm

    enter("memcpy", RingMemcpy(pages))
    enter("raw_tcp", RawTcpPair(pages))
    for name in options.transports:
        enter(name, PeerArm(name, pages))
        if not options.no_whole:
            enter(f"{name}_whole", PeerArm(name, pages, whole=True))
    return arms


def report(seconds: dict[str, list[float]], size: int) -> dict[str, dict[str, Any]]:
    """Medians, and each transport's share of its floor, round by round."""
    mb_s = {name: round(size / 1e6 / statistics.median(took)) for name, took in seconds.items()}
    share = {}
    for name in seconds:
        floor = FLOORS.get(name.removesuffix("_whole"), "")
        if floor:
            shares = [own / ours for own, ours in zip(seconds[floor], seconds[name], strict=True)]
            middle, least, most = (round(value, 3) for value in (statistics.median(shares), min(shares), max(shares)))
            share[name] = {"of": floor, "share": middle, "least": least, "most": most}
    return {"mb_s": mb_s, "share": share}


if __name__ == "__main__":
    sys.exit(main())
