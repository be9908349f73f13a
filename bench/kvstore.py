"""Pages in and out of the kvstore's tiers, beside what memory, a socket, the disk and Redis can do by themselves.

`python -m bench.kvstore` prints JSON, in MB/s (medians over rounds, arms interleaved), for each page size:

    floor   memcpy, raw TCP, one file per page with O_DIRECT, raw Redis in pipelines
    tier    a store in this process with checksums on: RAM (begin, write, commit; look up, read), disk and Redis
            (until a put is written below; until a lookup has it in memory)
    grpc    Put and Get of a kvstore process over gRPC

A Redis is started where redis-server is installed. The disk is that of `--folder`.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np

from bench.kvstore_floor import file_floor, memcpy_floor, redis_floor, redis_process, tcp_floor
from bench.mover import kvstore
from quire_common.kv_client import KvClient
from quire_common.pages import HEADER_BYTES, PageRun, frame_page
from quire_kvstore.config import KvstoreConfig
from quire_kvstore.page_store import PageStore
from quire_kvstore.puts import MAX_FRAME_BYTES
from quire_kvstore.tiers.make_tiers import make_tiers

if TYPE_CHECKING:
    from collections.abc import Iterator

NAMESPACE = b"n" * 32
LIMIT_S = 120.0
Figures = dict[str, float]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page-kib", type=int, nargs="+", default=[64, 2048])
    parser.add_argument("--mib", type=int, default=128, help="bytes of one round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", default=None, help="where the disk tier is measured; default: a temporary folder")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="quire-bench-", dir=options.folder) as folder, redis_process() as url:
        sizes = {f"{kib}KiB": measure(kib << 10, options, Path(folder), url) for kib in options.page_kib}
    print(json.dumps({**vars(options), "load": os.getloadavg()[0], "sizes": sizes}))
    return 0


def measure(page_bytes: int, options: argparse.Namespace, folder: Path, url: str) -> dict[str, Figures]:
    count = max((options.mib << 20) // page_bytes, 1)
    bodies = np.random.default_rng(0).integers(0, 256, (count, page_bytes), dtype=np.uint8)
    rounds: list[dict[str, Figures]] = []
    with kvstore(3 * (options.mib << 20)) as address, grpc.insecure_channel(address) as channel:
        client = KvClient(channel, LIMIT_S)
        for number in range(-1, options.rounds):  # the first one warms up
            run, framed = named(bodies, f"{page_bytes} {number}")
            root = folder / f"{page_bytes}-{number}"
            arms = {
                "floor": floor(framed, root / "raw", url),
                "tier": tiers(run, framed, root, url),
                "grpc": over_grpc(client, run, bodies),
            }
            if number >= 0:
                rounds.append(arms)
    return {
        arm: {name: round(statistics.median(one[arm][name] for one in rounds)) for name in rounds[0][arm]}
        for arm in rounds[0]
    }


def named(bodies: np.ndarray[Any, np.dtype[np.uint8]], what: str) -> tuple[PageRun, list[bytes]]:
    """New names, so that nothing of an earlier round passes for this one's."""
    hashes = tuple(hashlib.sha256(f"{what} {index}".encode()).digest() for index in range(len(bodies)))
    run = PageRun(NAMESPACE, 0, hashes)
    return run, [frame_page(run.key(i), "uint8", body) + body.tobytes() for i, body in enumerate(bodies)]


def floor(framed: list[bytes], folder: Path, url: str) -> Figures:
    found = {"memcpy": memcpy_floor(framed), "tcp": tcp_floor(framed)}
    found["file_write"], found["file_read"] = file_floor(framed, folder)
    if url:
        found["redis_set"], found["redis_get"] = redis_floor(framed, url)
    return found


@contextlib.contextmanager
def store_of(framed: list[bytes], **below: object) -> Iterator[PageStore]:
    total = sum(len(page) + 4096 for page in framed)
    limit_ms = int(LIMIT_S * 1e3)
    settings = KvstoreConfig(ram_bytes=total, max_pending_bytes=total, disk_bytes=2 * total, prefetch_ms=limit_ms)
    settings = replace(settings, redis_timeout_ms=limit_ms, **below)  # type: ignore[arg-type]  # fields by name
    store = PageStore(settings, tiers=make_tiers(settings))
    store.start()
    try:
        yield store
    finally:
        store.drain()
        store.close()


def tiers(run: PageRun, framed: list[bytes], folder: Path, url: str) -> Figures:
    found: Figures = {}
    with store_of(framed) as store:
        found["ram_put"] = rate(framed, lambda: put(store, run, framed))
        found["ram_get"] = rate(framed, lambda: get(store, run, framed, "ram"))
    below: dict[str, dict[str, object]] = {"disk": {"disk_path": str(folder / "tier")}}
    if url:
        below["redis"] = {"redis_url": url}
    for medium, settings in below.items():
        with store_of(framed, **settings) as store:
            wait_until(lambda store=store: all(tier.available for tier in store.stats().tiers))
            put_s = timed(lambda store=store: put(store, run, framed))
            flush_s = timed(lambda store=store: store.flush(LIMIT_S))
            found[f"{medium}_put"] = sum(map(len, framed)) / 1e6 / (put_s + flush_s)
        with store_of(framed, **settings) as store:
            wait_until(lambda store=store: all(tier.available for tier in store.stats().tiers))
            found[f"{medium}_get"] = rate(framed, lambda store=store: look_up(store, run))
            get(store, run, framed, "ram")
    return found


def put(store: PageStore, run: PageRun, framed: list[bytes]) -> None:
    wanted, lease = store.begin_put(run, len(framed[0]) - HEADER_BYTES, 0)
    if lease is None or len(wanted) != len(run):
        raise SystemExit("the store does not want its pages")
    for index in wanted:
        view = memoryview(framed[index])
        for start in range(0, len(view), MAX_FRAME_BYTES):
            store.write(lease.id, index, start, view[start : start + MAX_FRAME_BYTES])  # type: ignore[arg-type]  # it is copied, whatever it is
    if store.commit(lease.id) != (len(run), 0):
        raise SystemExit("pages were refused")


def look_up(store: PageStore, run: PageRun) -> bytes:
    found, lease = store.lookup(run, 0, pin=True)
    if lease is None or found != len(run):
        raise SystemExit(f"{found} pages of {len(run)} were found")
    return lease.id


def get(store: PageStore, run: PageRun, framed: list[bytes], medium: str) -> None:
    """Every page, a frame at a time; the last is compared."""
    lease = look_up(store, run)
    for index in range(len(run)):
        parts: list[bytes] = []
        last = False
        while not last:
            part, last = store.read(lease, index, sum(map(len, parts)), MAX_FRAME_BYTES)
            parts.append(part)
    if b"".join(parts) != framed[-1]:
        raise SystemExit(f"a page came back changed from {medium}")
    store.release([lease])


def over_grpc(client: KvClient, run: PageRun, bodies: np.ndarray[Any, np.dtype[np.uint8]]) -> Figures:
    """In calls of 16 pages, as a worker moves them."""
    parts = [PageRun(NAMESPACE, 0, run.hashes[start : start + 16]) for start in range(0, len(run), 16)]
    data = [bodies[start : start + 16] for start in range(0, len(run), 16)]
    total_mb = bodies.nbytes / 1e6

    def store_all() -> None:
        for part, of_part in zip(parts, data, strict=True):
            client.put_pages(part, "uint8", bodies.shape[1], lambda i, of_part=of_part: of_part[i])  # type: ignore[misc]  # bound early

    def load_all() -> None:
        for part, of_part in zip(parts, data, strict=True):
            lease = client.lookup(part).lease
            pages = dict(client.get_pages(lease))
            client.release(lease)
            if len(pages) != len(part) or pages[0][HEADER_BYTES:] != of_part[0].tobytes():
                raise SystemExit("a page came back changed over gRPC")

    return {"put": total_mb / timed(store_all), "get": total_mb / timed(load_all)}


def wait_until(condition: Any) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit("a tier does not become available")
        time.sleep(0.01)


def timed(what: Any) -> float:
    begin = time.perf_counter()
    what()
    return time.perf_counter() - begin


def rate(framed: list[bytes], what: Any) -> float:
    return sum(map(len, framed)) / 1e6 / timed(what)


if __name__ == "__main__":
    sys.exit(main())
