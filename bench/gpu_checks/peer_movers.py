"""Pages from one GPU to another by the real movers of two workers: rings, processes, frames and leases included.

`python -m bench.gpu_checks.peer_movers export PAGES` has a pool of 2-MiB pages on its GPU, says where they are served,
and exports all for each line (a lease key); `... pull PAGES GPU` starts that on another GPU, pulls all by each
transport, and prints a JSON line for each.
"""

from __future__ import annotations

import hashlib
import json
import os
import statistics
import subprocess
import sys
import time
from functools import partial

import numpy as np
import torch

from bench.gpu_checks.peer_pool import fill, page_content
from bench.transfer_arms import Engine
from quire_common.credit import MoveKind, PageMove
from quire_common.credit.hello import RankAddress
from quire_worker.cuda.cuda_copier import CudaCopier
from quire_worker.cuda.cuda_pages import CudaPages
from quire_worker.kv.page_geometry import KvGroup

GROUP = KvGroup("full", "full", layers=8, kv_heads=8, head_dim=128, dtype="bfloat16", page_size=64)
# Each by what a ticket would name.
WAYS = {"cuda_ipc": ("cuda_ipc", "shm", "tcp"), "shm": ("shm",), "tcp": ("tcp",)}
_REPEATS = 3


def a_pool(pages: int) -> tuple[CudaPages, Engine]:
    """One more than the pages that move; and a mover before it."""
    pool = CudaPages(GROUP, (pages + 1) * GROUP.page_bytes, torch.device("cuda"))
    return pool, Engine("auto", GROUP.page_bytes, partial(CudaCopier, pool), pool.descriptor())


def a_move(kind: MoveKind, number: int, order: list[int], key: bytes, source: tuple[RankAddress, ...] = ()) -> PageMove:
    hashes = tuple(hashlib.sha256(key + index.to_bytes(4, "little")).digest() for index in range(len(order)))
    return PageMove(number, kind, 0, np.array(order, np.int32), hashes, b"id", lease_key=key, source=source)


def export(pages: int) -> None:
    pool, engine = a_pool(pages)
    fill(pool.rows)
    torch.cuda.synchronize()
    print(json.dumps([(address.transport, address.descriptor.hex()) for address in engine.addresses]), flush=True)
    for number, line in enumerate(sys.stdin):
        move = a_move(MoveKind.EXPORT, number, list(range(1, pages + 1)), bytes.fromhex(line))
        engine.carry([move], lambda: print("ready", flush=True))
        print("done", flush=True)
    engine.close()


def pull(pages: int, gpu: str) -> None:
    command = [sys.executable, "-m", "bench.gpu_checks.peer_movers", "export", str(pages)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": gpu}
    pool, engine = a_pool(pages)
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as peer:
        if peer.stdin is None or peer.stdout is None:
            raise SystemExit("the exporter has no pipes")
        told = [(name, bytes.fromhex(descriptor)) for name, descriptor in json.loads(peer.stdout.readline())]
        for way, names in WAYS.items():
            source = tuple(RankAddress(0, name, descriptor) for name, descriptor in told if name in names)
            if source[0].transport != way:
                print(json.dumps({"name": way, "failed": "it is not offered"}), flush=True)
                continue
            spent, wrong = [], 0
            for number in range(1 + _REPEATS):
                order, key = np.random.default_rng(number).permutation(pages) + 1, os.urandom(32)
                pool.rows.fill_(0xA5)
                torch.cuda.synchronize()
                print(key.hex(), file=peer.stdin, flush=True)
                peer.stdout.readline()
                begin = time.perf_counter()
                engine.carry([a_move(MoveKind.PULL, number, order.tolist(), key, source)])
                spent.append(time.perf_counter() - begin)
                peer.stdout.readline()
                wrong = max(wrong, _wrong(pool, order.tolist()))
            took_s = statistics.median(spent[1:])
            gb_per_s = pages * GROUP.page_bytes / 1e9 / took_s
            print(
                json.dumps({"name": way, "pages": pages, "gb_per_s": gb_per_s, "ms": took_s * 1e3, "wrong": wrong}),
                flush=True,
            )
        peer.stdin.close()
    engine.close()


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
