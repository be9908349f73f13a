"""Moves pages between two GPUs with the real KV transfer agents of two workers, including rings, processes, frames and
leases.

`python -m bench.gpu.peers.movers export PAGES` makes a pool of 2-MiB pages on its GPU, prints the address that serves
them, and exports all pages for each input line (a lease key). `... pull PAGES GPU` starts the first program on another
GPU and pulls all pages with each transport. It prints a JSON line for each, with the parts of the time of a pull by
CUDA IPC. Without a GPU, a stand-in takes as long as a link of 394 GB/s, and copies nothing; all other times are real.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from bench.disaggregation.transfer_arms import Engine
from bench.gpu.peers.pool import fill, page_content
from bench.gpu.peers.watched_copier import HostStandIn, Watch, WatchedCopier
from quire_common.credit import MoveKind, PageMove
from quire_common.credit.hello import RankAddress
from quire_worker.cuda.cuda_copier import CudaCopier
from quire_worker.cuda.cuda_pages import CudaPages
from quire_worker.kv.page_geometry import kv_group
from quire_worker.kv_transfer.copier import Copier
from quire_worker.kv_transfer.peers.peer_access import host_id
from quire_worker.kv_transfer.ring import Ring

PAGE_SIZE = 64
GROUP = kv_group(layers=8, kv_heads=8, head_dim=128, dtype="bfloat16", page_size=PAGE_SIZE)
# Each by what a ticket would name.
WAYS = {"cuda_ipc": ("cuda_ipc", "shm", "tcp"), "shm": ("shm",), "tcp": ("tcp",)}
# The fewer milliseconds, the more of them. Odd: one pull is in the middle.
REPEATS = {"cuda_ipc": 15, "shm": 3, "tcp": 3}
_LINK_BYTES_PER_S = 394e9


class Side:
    """A pool with one page more than the pages that move, and its transfer agent. Without a GPU there is no pool."""

    def __init__(self, pages: int) -> None:
        self.pool: CudaPages | None = None
        memory = b"stand-in" + host_id()
        make: Callable[[Ring], Copier] = partial(HostStandIn, GROUP.page_bytes / _LINK_BYTES_PER_S)
        if torch.cuda.is_available():
            self.pool = CudaPages(GROUP, PAGE_SIZE, (pages + 1) * GROUP.page_bytes, torch.device("cuda"))
            memory, make = self.pool.descriptor(), partial(CudaCopier, self.pool)
        self.copiers: list[WatchedCopier] = []

        def watched(ring: Ring) -> WatchedCopier:
            self.copiers.append(WatchedCopier(make(ring)))
            return self.copiers[-1]

        self.engine = Engine("auto", GROUP.page_bytes, watched, memory)
        wake = self.engine.transfer_agent.wake

        def count() -> None:
            self.copiers[0].watch.wakes += 1
            wake()

        self.engine.transfer_agent.wake = count

    def timed(self, move: PageMove) -> tuple[float, dict[str, float]]:
        """Return the seconds of a pull, and the parts of this time."""
        watch = self.copiers[0].watch = Watch()
        self.engine.carry([move])
        ended = time.perf_counter()
        counts = {"launches": watch.launches, "wakes": watch.wakes}
        return ended - watch.began, {**watch.parts_ms(ended), **counts}

    def wipe(self) -> None:
        """Overwrite the pages, so that new content differs from old content."""
        if self.pool is not None:
            self.pool.rows.fill_(0xA5)
            torch.cuda.synchronize()


def a_move(kind: MoveKind, number: int, order: list[int], key: bytes, source: tuple[RankAddress, ...] = ()) -> PageMove:
    hashes = tuple(hashlib.sha256(key + index.to_bytes(4, "little")).digest() for index in range(len(order)))
    return PageMove(number, kind, 0, np.array(order, np.int32), hashes, b"id", lease_key=key, source=source)


def export(pages: int) -> None:
    side = Side(pages)
    if side.pool is not None:
        fill(side.pool.rows)
        torch.cuda.synchronize()
    addresses = side.engine.addresses
    print(json.dumps([(address.transport, address.descriptor.hex()) for address in addresses]), flush=True)
    for number, line in enumerate(sys.stdin):
        move = a_move(MoveKind.EXPORT, number, list(range(1, pages + 1)), bytes.fromhex(line))
        side.engine.carry([move], lambda: print("ready", flush=True))
        print("done", flush=True)
    side.engine.close()


def pull(pages: int, gpu: str) -> None:
    command = [sys.executable, "-m", "bench.gpu.peers.movers", "export", str(pages)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": gpu}
    side = Side(pages)
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as peer:
        if peer.stdin is None or peer.stdout is None:
            raise SystemExit("the exporter has no pipes")
        told = [(name, bytes.fromhex(descriptor)) for name, descriptor in json.loads(peer.stdout.readline())]
        for config, names in WAYS.items():
            source = tuple(RankAddress(0, name, descriptor) for name, descriptor in told if name in names)
            if source[0].transport != config:
                print(json.dumps({"name": config, "failed": "it is not offered"}), flush=True)
                continue
            found, wrong = [], 0
            for number in range(1 + REPEATS[config]):
                order, key = np.random.default_rng(number).permutation(pages) + 1, os.urandom(32)
                # What a scheduler has done before: the names of pages are no part of their way.
                move = a_move(MoveKind.PULL, number, order.tolist(), key, source)
                side.wipe()
                print(key.hex(), file=peer.stdin, flush=True)
                peer.stdout.readline()
                found.append(side.timed(move))
                peer.stdout.readline()
                wrong = max(wrong, 0 if side.pool is None else _wrong(side.pool, order.tolist()))
            # The parts are those of the pull in the middle, so that they add up.
            took_s, parts = sorted(found[1:], key=lambda each: each[0])[REPEATS[config] // 2]
            told_of = {"pages": pages, "gb_per_s": pages * GROUP.page_bytes / 1e9 / took_s, "ms": took_s * 1e3}
            told_of["fastest_ms"] = min(found[1:], key=lambda each: each[0])[0] * 1e3
            print(json.dumps({"name": config, **told_of, "wrong": wrong, **parts}), flush=True)
        peer.stdin.close()
    side.engine.close()


def _wrong(pool: CudaPages, order: list[int]) -> int:
    size, device = pool.page_bytes, pool.rows.device
    return sum(
        not torch.equal(pool.rows[page], page_content(number, size, device)) for number, page in enumerate(order, 1)
    )


if __name__ == "__main__":
    if sys.argv[1] == "export":
        export(int(sys.argv[2]))
    else:
        pull(int(sys.argv[2]), sys.argv[3])
