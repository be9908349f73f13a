"""The store's figures as Prometheus metrics. Reads them at every sweep; knows nothing of how they come about."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from quire_common.telemetry.metrics import counter, gauge
from quire_kvstore.page_store import StoreCounts
from quire_kvstore.ram_tier import MEDIUM

if TYPE_CHECKING:
    from quire_kvstore.page_store import StoreStats


class StoreMetrics:
    """Counters grow by what happened since the last update."""

    def __init__(self) -> None:
        self._counters = {
            "hits": counter("quire_kvstore_hits_total", "Pages looked up and found."),
            "misses": counter("quire_kvstore_misses_total", "Pages looked up and not found."),
            "stored": counter("quire_kvstore_stored_total", "Pages put."),
            "refused": counter("quire_kvstore_refused_total", "Pages put in vain: no room, incomplete or corrupt."),
            "corrupt": counter("quire_kvstore_corrupt_total", "Pages put with a wrong key, length or checksum."),
        }
        self._evictions = counter("quire_kvstore_evictions_total", "Pages evicted.", ("medium",)).labels(MEDIUM)
        self._gauges = {
            name: gauge(f"quire_kvstore_{name}", text, ("medium",)).labels(MEDIUM)
            for name, text in (
                ("pages", "Visible pages."),
                ("used_bytes", "Memory taken."),
                ("capacity_bytes", "All memory."),
            )
        } | {
            name: gauge(f"quire_kvstore_{name}", text)
            for name, text in (
                ("leases", "Leases of lookups."),
                ("pending_puts", "Puts under way."),
                ("pending_bytes", "Memory of puts under way."),
                ("watchers", "Watch streams."),
            )
        }
        self._last = StoreCounts()
        self._last_evictions = 0

    def update(self, stats: StoreStats) -> None:
        """Take over the figures of a moment."""
        for name, metric in self._counters.items():
            metric.inc(getattr(stats.counts, name) - getattr(self._last, name))
        self._evictions.inc(stats.evictions - self._last_evictions)
        self._last, self._last_evictions = dataclasses.replace(stats.counts), stats.evictions
        for name, value in self._gauges.items():
            value.set(getattr(stats, name))
