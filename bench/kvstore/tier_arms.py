"""The kvstore's tiers as arms of its benchmark: a store in this process, with checksums.

As in service, one store serves all rounds, so its memory is resident after the first. A put to a lower tier lasts until
the last page is written there. A get reads the pages of the round before, which other pages have evicted from memory.
It lasts until a lookup has all of them in memory.
"""

from __future__ import annotations

import os
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from bench.kvstore.floor import KEPT, RedisLine
from quire_common.pages import HEADER_BYTES
from quire_kvstore.config import KvstoreConfig
from quire_kvstore.page_store import PageStore
from quire_kvstore.puts import MAX_FRAME_BYTES
from quire_kvstore.tiers.make_tiers import make_tiers
from quire_kvstore.tiers.redis_backend import redis_key

if TYPE_CHECKING:
    from bench.kvstore.pages import Pages

LIMIT_S = 120.0
# Pages of one put, as workers move them.
PART = 16


class StoreArm:
    """Calls a PageStore directly."""

    def __init__(self, pages: Pages, rounds: int, *, keep: int = 1, **below: object) -> None:
        """`keep`: the number of rounds whose pages fit into memory."""
        room = (pages.framed_bytes + 4096) * len(pages.framed)
        limit_ms = int(LIMIT_S * 1e3)
        settings = KvstoreConfig(
            ram_bytes=keep * room, max_pending_bytes=room, disk_bytes=(rounds + 2) * room, prefetch_ms=limit_ms
        )
        settings = replace(settings, redis_timeout_ms=limit_ms, **below)  # type: ignore[arg-type]  # fields by name
        self.config = settings
        self._store = PageStore(settings, tiers=make_tiers(settings))
        self._store.start()
        deadline = time.monotonic() + LIMIT_S
        while not all(tier.available for tier in self._store.stats().tiers):
            if time.monotonic() > deadline:
                raise SystemExit("a tier does not become available")
            time.sleep(0.01)

    def put(self, pages: Pages) -> float:
        os.sync()  # no arm pays for what another has left to the filesystem
        begin = time.perf_counter()
        for part in pages.parts(PART):
            self._put_part(pages, part)
        self._store.flush(LIMIT_S)
        took_s = time.perf_counter() - begin
        below = [tier for tier in self._store.stats().tiers if tier.name != "ram"]
        if any(tier.figures.dropped or tier.figures.errors or tier.figures.corrupt for tier in below):
            raise SystemExit(f"pages did not reach the tier: {below}")
        return took_s

    def get(self, pages: Pages) -> float:
        begin = time.perf_counter()
        found, lease = self._store.lookup(pages.run, 0, pin=True)
        took_s = time.perf_counter() - begin
        if lease is None or found != len(pages.run):
            raise SystemExit(f"{found} pages of {len(pages.run)} were found")
        if self._page(lease.id, len(pages.run) - 1) != pages.framed[-1]:
            raise SystemExit("a page came back changed")
        self._store.release([lease.id])
        return took_s

    def close(self) -> None:
        self._store.drain()
        self._store.close()

    def _put_part(self, pages: Pages, part: range) -> None:
        run = replace(pages.run, hashes=pages.run.hashes[part.start : part.stop])
        wanted, lease, _ = self._store.begin_put(run, pages.framed_bytes - HEADER_BYTES, 0)
        if lease is None or len(wanted) != len(run):
            raise SystemExit("the store does not want its pages")
        for index in wanted:
            view = memoryview(pages.framed[part.start + index])
            for start in range(0, len(view), MAX_FRAME_BYTES):
                self._store.write(lease.id, index, start, view[start : start + MAX_FRAME_BYTES])
        if self._store.commit(lease.id) != (len(run), 0):
            raise SystemExit("pages were refused")

    def _page(self, lease: bytes, index: int) -> bytes:
        parts: list[bytes] = []
        last = False
        while not last:
            part, last = self._store.read(lease, index, sum(map(len, parts)), MAX_FRAME_BYTES)
            parts.append(part)
        return b"".join(parts)


class RedisArm(StoreArm):
    """Stores pages in a Redis, whose memory is reused like that of the raw arms."""

    def __init__(self, url: str, pages: Pages, rounds: int) -> None:
        super().__init__(pages, rounds, redis_url=url)
        self._line = RedisLine(url, pages.framed_bytes, 0)
        self._kept: list[Pages] = []

    def put(self, pages: Pages) -> float:
        self._kept.append(pages)
        if len(self._kept) > KEPT:
            self._line.forget(list(map(redis_key, self._kept.pop(0).run.keys())))
        return super().put(pages)

    def close(self) -> None:
        self._line.close()
        super().close()


class RamArm(StoreArm):
    """Stores pages in memory only. A get reads every page, a frame at a time."""

    def get(self, pages: Pages) -> float:
        begin = time.perf_counter()
        found, lease = self._store.lookup(pages.run, 0, pin=True)
        if lease is None or found != len(pages.run):
            raise SystemExit(f"{found} pages of {len(pages.run)} were found")
        for index in range(len(pages.run)):
            last_page = self._page(lease.id, index)
        self._store.release([lease.id])
        took_s = time.perf_counter() - begin
        if last_page != pages.framed[-1]:
            raise SystemExit("a page came back changed from memory")
        return took_s
