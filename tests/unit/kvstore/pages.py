"""Pages for the kvstore's tests: small, different from each other, and framed as workers frame them."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import TYPE_CHECKING

from quire_common.pages import HEADER_BYTES, PageRun, check_page, frame_page
from quire_kvstore.arena import Arena
from quire_kvstore.config import KvstoreConfig

if TYPE_CHECKING:
    from quire_common.kv.page_mac import PageMac
    from quire_kvstore.page_store import PageStore

NAMESPACE = hashlib.sha256(b"namespace").digest()
BODY_BYTES = 960
FRAMED_BYTES = HEADER_BYTES + BODY_BYTES  # a multiple of 64: nothing is lost to alignment
PLACE_BYTES = Arena.footprint(FRAMED_BYTES)  # what such a page takes in memory


def chain(name: str, length: int, namespace: bytes = NAMESPACE, group: int = 0) -> PageRun:
    hashes = [hashlib.sha256(f"{name} {index}".encode()).digest() for index in range(length)]
    return PageRun(namespace, group, tuple(hashes))


def part(run: PageRun, start: int, end: int) -> PageRun:
    return replace(run, hashes=run.hashes[start:end])


def body(run: PageRun, index: int, size: int = BODY_BYTES) -> bytes:
    """Bytes that only this page has."""
    return hashlib.shake_128(run.hashes[index]).digest(size)


def framed(run: PageRun, index: int, size: int = BODY_BYTES, mac: PageMac | None = None) -> bytes:
    data = body(run, index, size)
    return frame_page(run.key(index), "uint8", data, mac) + data


def config(pages: int, **changes: object) -> KvstoreConfig:
    """A store with room for so many of these pages."""
    return replace(KvstoreConfig(ram_bytes=pages * PLACE_BYTES), **changes)  # type: ignore[arg-type]  # changes by name


def put(store: PageStore, run: PageRun, mac: PageMac | None = None) -> tuple[int, int]:
    """A whole put of what is wanted; returns stored and refused pages."""
    wanted, lease, _ = store.begin_put(run, BODY_BYTES, 0)
    if lease is None:
        return 0, 0
    for index in wanted:
        store.write(lease.id, index, 0, framed(run, index, mac=mac))
    return store.commit(lease.id)


def length(store: PageStore, run: PageRun) -> int:
    """How much of a run is there, without touching it."""
    return store.lookup(run, 0, pin=False)[0]


class Clock:
    """Time that passes when told."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def read_all(store: PageStore, lease: bytes, run: PageRun, index: int, step: int = FRAMED_BYTES) -> None:
    """Reads a page in steps and checks every byte."""
    data, last = b"", False
    while not last:
        part_, last = store.read(lease, index, len(data), step)
        data += part_
    assert bytes(check_page(data, run.key(index), "uint8", BODY_BYTES)) == body(run, index)
