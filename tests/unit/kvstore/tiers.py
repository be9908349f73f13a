"""Stores with tiers for tests: small, quick to retry, and checked in the end."""

from __future__ import annotations

import contextlib
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from quire_common.kv.page_mac import PageMac
from quire_kvstore.arena import HEAD_BYTES
from quire_kvstore.page_store import PageStore, PinnedPages
from quire_kvstore.tiers.aligned import whole_blocks
from quire_kvstore.tiers.make_tiers import make_tiers
from tests.unit.kvstore.pages import FRAMED_BYTES, config, read_all

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from quire_common.pages import PageRun
    from quire_kvstore.store_stats import TierStats

ON_DISK_BYTES = whole_blocks(FRAMED_BYTES)
LIMIT_S = 30.0


@contextlib.contextmanager
def tiered(pages: int = 8, disk: Path | None = None, disk_pages: int = 64, **changes: object) -> Iterator[PageStore]:
    """A running store; `disk` and `redis_url` say what is below memory. Lookups wait long: machines are slow."""
    settings = replace(config(pages), disk_bytes=disk_pages * ON_DISK_BYTES, prefetch_ms=int(LIMIT_S * 1000))
    settings = replace(settings, disk_retry_s=0.05, redis_retry_s=0.05, disk_path=str(disk or ""))
    settings = replace(settings, redis_timeout_ms=5000)
    settings = replace(settings, **changes)  # type: ignore[arg-type]  # changes by name
    mac = PageMac.from_config(settings.page_mac_key, settings.page_mac_key_file)
    store = PageStore(settings, tiers=make_tiers(settings, mac), mac=mac)
    store.start()
    try:
        yield store
        store.check_integrity()
    finally:
        store.drain()
        store.close()


def tier(store: PageStore, tier_name: str) -> TierStats:
    """A tier's figures."""
    return next(stats for stats in store.stats().tiers if stats.name == tier_name)


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, f"it did not come true within {LIMIT_S} s"
        time.sleep(0.005)


def found(store: PageStore, run: PageRun, wait_s: float | None = None) -> tuple[int, str]:
    """A lookup with a lease: how much there is and from where; every byte is compared, and the lease released."""
    pages, lease = store.lookup(run, 0, pin=True, wait_s=wait_s)
    if lease is None:
        assert pages == 0
        return 0, ""
    assert isinstance(lease.held, PinnedPages)
    for index in range(pages):
        read_all(store, lease.id, run, index)
    assert store.release([lease.id]) == 1
    return pages, lease.held.slowest_tier


def forget_memory(store: PageStore) -> None:
    """Everything leaves RAM, as if other pages had pushed it out."""
    with store._lock:
        offset = store._ram.reserve(store._ram.capacity_bytes - HEAD_BYTES)
        assert offset is not None, "something is pinned"
        store._ram.cancel(offset)
        store._tier_manager.publish_evictions()
