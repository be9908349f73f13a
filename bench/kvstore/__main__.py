"""Measures how fast the kvstore's tiers store and return pages, compared with plain memory, a socket, the disk and
Redis.

`python -m bench.kvstore` prints JSON. For each page size and each tier, by name of the tier:

    put, get       MB/s of the kvstore, checksums on (bench/kvstore/tier_arms.py says what begins and ends them)
    raw            MB/s of the same medium with nothing in between: memcpy, TCP between two processes, one file per page
                   with O_DIRECT, Redis in pipelines; by one thread, and by as many as the tier has
    share          kvstore / the faster of its raws of the same round: the median over rounds, the least and the most

There are two groups of tiers. In the first group (ram, disk, redis), the store is in the benchmark's own process. In
the second (shm, tcp, grpc: bench/kvstore/transport_arms.py), a KV transfer agent uses a kvstore process through one of
its transports.

A tier and its raw arms take turns within a round, in an order that changes from round to round. The benchmark starts a
Redis if redis-server is installed. The disk is the one with the folder `--folder`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from bench.kvstore.floor import Memcpy, RawFiles, RawRedis, redis_process
from bench.kvstore.mover import kvstore
from bench.kvstore.pages import Pages
from bench.kvstore.raw_tcp import RawTcpPair
from bench.kvstore.tier_arms import RamArm, RedisArm, StoreArm
from bench.kvstore.transport_arms import RingMemcpy, TransportArm
from quire_kvstore.config import KvstoreConfig
from quire_kvstore.server import SWITCH_INTERVAL_S
from quire_worker.kv_transfer.transports.registry import Traffic, names

if TYPE_CHECKING:
    from collections.abc import Callable

    from bench.kvstore.floor import Arm

    Contestants = Callable[[contextlib.ExitStack, "Pages", argparse.Namespace], dict[str, Arm]]

WAYS = ("put", "get")
# Rounds that fill caches, and leave pages to be got.
WARM = 2


class Contest:
    """A tier against its raws, by name; the kvstore's own arm is called `kvstore`."""

    def __init__(self, arms: dict[str, Arm]) -> None:
        self._arms = arms
        self._mb_s: dict[str, dict[str, list[float]]] = {config: {name: [] for name in arms} for config in WAYS}
        self._before: Pages | None = None

    def round(self, pages: Pages, number: int) -> None:
        """Put these pages, get those of the round before. The first rounds do not count."""
        order = list(self._arms) if number % 2 else list(self._arms)[::-1]
        for config, wanted in zip(WAYS, (pages, self._before), strict=True):
            for name in order if wanted else ():
                assert wanted is not None
                seconds = getattr(self._arms[name], config)(wanted)
                if number >= WARM:
                    self._mb_s[config][name].append(wanted.total_bytes / 1e6 / seconds)
        self._before = pages

    def result(self) -> dict[str, dict[str, object]]:
        """By way."""
        found: dict[str, dict[str, object]] = {}
        for config, of_way in self._mb_s.items():
            raws = [values for name, values in of_way.items() if name != "kvstore"]
            shares = [own / max(raw) for own, *raw in zip(of_way["kvstore"], *raws, strict=True)]
            medians = {name: round(statistics.median(values)) for name, values in of_way.items()}
            spread = [round(value, 3) for value in (statistics.median(shares), min(shares), max(shares))]
            found[config] = {"mb_s": medians, "share": spread[0], "least": spread[1], "most": spread[2]}
        return found

    def close(self) -> None:
        for arm in self._arms.values():
            arm.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page-kib", type=int, nargs="+", default=[64, 2048])
    parser.add_argument("--mib", type=int, default=128, help="bytes of one round")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tiers", nargs="+", default=list(CONTESTS), choices=list(CONTESTS))
    parser.add_argument("--folder", default=None, help="where the disk tier is measured; default: a temporary folder")
    options = parser.parse_args()
    sys.setswitchinterval(SWITCH_INTERVAL_S)  # as the service does
    sizes = {
        f"{kib}KiB": {tier: measure(tier, kib << 10, options) for tier in options.tiers} for kib in options.page_kib
    }
    print(json.dumps({**vars(options), "load": os.getloadavg()[0], "sizes": sizes}))
    return 0


def measure(tier: str, page_bytes: int, options: argparse.Namespace) -> dict[str, dict[str, object]]:
    count = max((options.mib << 20) // page_bytes, 1)
    bodies = np.random.default_rng(0).integers(0, 256, (count, page_bytes), dtype=np.uint8)
    with contextlib.ExitStack() as stack:
        arms = CONTESTS[tier](stack, Pages.make(bodies, "first"), options)
        if len(arms) < 2:
            return {}
        contest = Contest(arms)
        stack.callback(contest.close)
        for number in range(WARM + options.rounds):
            contest.round(Pages.make(bodies, f"{page_bytes}-{number}"), number)
        return contest.result()


def ram(stack: contextlib.ExitStack, pages: Pages, options: argparse.Namespace) -> dict[str, Arm]:
    return {"kvstore": RamArm(pages, options.rounds, keep=3), "memcpy": Memcpy(pages)}


def disk(stack: contextlib.ExitStack, pages: Pages, options: argparse.Namespace) -> dict[str, Arm]:
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="quire-bench-", dir=options.folder)))
    arms: dict[str, Arm] = {
        "kvstore": StoreArm(pages, options.rounds, disk_path=str(folder / "tier")),
        "raw": RawFiles(folder / "raw", pages, 1),
    }
    threads = max(KvstoreConfig().disk_read_threads, KvstoreConfig().disk_write_threads)
    if threads > 1:
        arms[f"raw_{threads}_threads"] = RawFiles(folder / "raw-threads", pages, threads)
    return arms


def redis(stack: contextlib.ExitStack, pages: Pages, options: argparse.Namespace) -> dict[str, Arm]:
    url = stack.enter_context(redis_process())
    if not url:
        return {}
    arms: dict[str, Arm] = {
        "kvstore": RedisArm(url, pages, options.rounds),
        "raw": RawRedis(url, pages, 1, database=1),
    }
    threads = max(KvstoreConfig().redis_read_threads, KvstoreConfig().redis_write_threads)
    if threads > 1:
        arms[f"raw_{threads}_connections"] = RawRedis(url, pages, threads, database=2)
    return arms


def over_transport(transport: str) -> Contestants:
    """A KV transfer agent's transport to a kvstore process, against what it should come near to."""

    def contestants(stack: contextlib.ExitStack, pages: Pages, options: argparse.Namespace) -> dict[str, Arm]:
        address = stack.enter_context(kvstore(4 * pages.total_bytes, "--ram-populate"))
        arms: dict[str, Arm] = {"kvstore": TransportArm(address, transport, pages)}
        return arms | ({"memcpy": RingMemcpy(pages)} if transport == "shm" else {"tcp": RawTcpPair(pages)})

    return contestants


CONTESTS: dict[str, Contestants] = {
    "ram": ram,
    "disk": disk,
    "redis": redis,
    **{transport: over_transport(transport) for transport in names(Traffic.STORE)},
}


if __name__ == "__main__":
    sys.exit(main())
