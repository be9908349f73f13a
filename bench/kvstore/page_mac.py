"""Measures the cost of MACs of pages.

`python -m bench.kvstore.page_mac` prints JSON. For each page size:

    gib_s      GiB/s of each MAC, and of the checksum, over a header and a body in memory: the best of the rounds
    tcp        MB/s of transfers to and from a kvstore process over its data port: `kvstore` with --page-mac-key,
               `checksum` without; `share` is the first by the second, the median over rounds, the least and the most
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import sys
import time
from typing import TYPE_CHECKING

import numpy as np
import xxhash
from blake3 import blake3

from bench.kvstore.__main__ import WARM, Contest
from bench.kvstore.mover import kvstore
from bench.kvstore.pages import Pages
from bench.kvstore.transport_arms import TransportArm
from quire_common.kv.page_mac import PageMac
from quire_common.pages import HEADER_BYTES
from quire_kvstore.server import SWITCH_INTERVAL_S

if TYPE_CHECKING:
    from collections.abc import Callable

KEY = "5f" * 32
_SECRET = bytes.fromhex(KEY)
_LEAST_BYTES = 64 << 20


def keyed_blake3(threads: int) -> Callable[[bytes, bytes], bytes]:
    def mac(header: bytes, body: bytes) -> bytes:
        return blake3(header, key=_SECRET, max_threads=threads).update(body).digest(length=16)

    return mac


def keyed_blake2b(header: bytes, body: bytes) -> bytes:
    state = hashlib.blake2b(header, key=_SECRET, digest_size=16)
    state.update(body)
    return state.digest()


def xxh3(header: bytes, body: bytes) -> bytes:
    state = xxhash.xxh3_64(header)
    state.update(body)
    return bytes(state.digest())


MACS: dict[str, Callable[[bytes, bytes], bytes]] = {
    "blake3": keyed_blake3(1),
    "blake3_all_cores": keyed_blake3(blake3.AUTO),
    "blake2b": keyed_blake2b,
    "xxh3_checksum": xxh3,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page-kib", type=int, nargs="+", default=[64, 2048])
    parser.add_argument("--mib", type=int, default=64, help="bytes of one round of transfers")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    sys.setswitchinterval(SWITCH_INTERVAL_S)  # as the service does
    sizes = {
        f"{kib}KiB": {"gib_s": rates(kib << 10, options.rounds), "tcp": transfers(kib << 10, options)}
        for kib in options.page_kib
    }
    print(json.dumps({**vars(options), "load": os.getloadavg()[0], "sizes": sizes}))
    return 0


def rates(page_bytes: int, rounds: int) -> dict[str, float]:
    """GiB/s by MAC, which take turns."""
    header, body = bytes(HEADER_BYTES), os.urandom(page_bytes)
    repeats = max(_LEAST_BYTES // page_bytes, 1)
    best = dict.fromkeys(MACS, 0.0)
    for _ in range(rounds):
        for name, mac in MACS.items():
            begin = time.perf_counter()
            for _ in range(repeats):
                mac(header, body)
            best[name] = max(best[name], repeats * page_bytes / (time.perf_counter() - begin) / (1 << 30))
    return {name: round(rate, 2) for name, rate in best.items()}


def transfers(page_bytes: int, options: argparse.Namespace) -> dict[str, dict[str, object]]:
    """A store that has the key and one that has none, by turns."""
    count = max((options.mib << 20) // page_bytes, 1)
    bodies = np.random.default_rng(0).integers(0, 256, (count, page_bytes), dtype=np.uint8)
    first = Pages.make(bodies, "first")
    with contextlib.ExitStack() as stack:
        flags = ["--ram-populate"]
        keyless = stack.enter_context(kvstore(4 * first.total_bytes, *flags))
        keyed = stack.enter_context(kvstore(4 * first.total_bytes, *flags, f"--page-mac-key={KEY}"))
        mac = PageMac.from_config(KEY)
        contest = Contest(
            {"kvstore": TransportArm(keyed, "tcp", first, mac), "checksum": TransportArm(keyless, "tcp", first)}
        )
        stack.callback(contest.close)
        for number in range(WARM + options.rounds):
            contest.round(Pages.make(bodies, f"{page_bytes}-{number}"), number)
        return contest.result()


if __name__ == "__main__":
    sys.exit(main())
