"""The store's figures as Prometheus metrics, updated at every sweep. This module does not know how the figures
arise."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from quire_common.telemetry.metrics import counter, gauge
from quire_kvstore.store_stats import StoreCounts
from quire_kvstore.tiers.backend import TierFigures

if TYPE_CHECKING:
    from quire_kvstore.store_stats import StoreStats, TierStats

_TIER_COUNTERS = {
    "hits": ("quire_kvstore_tier_hits_total", "Pages of lookups' answers that came from this tier."),
    "misses": ("quire_kvstore_tier_misses_total", "Pages asked of this tier that did not come from it."),
    "stored": ("quire_kvstore_tier_stored_total", "Pages written."),
    "evictions": ("quire_kvstore_evictions_total", "Pages evicted."),
    "corrupt": ("quire_kvstore_tier_corrupt_total", "Pages that were not what their keys say, and were removed."),
    "unauthenticated": (
        "quire_kvstore_tier_unauthenticated_total",
        "Of the corrupt pages, those that had no MAC under a key of --page-mac-key.",
    ),
    "dropped": ("quire_kvstore_tier_dropped_total", "Pages not written or read for want of room or of the medium."),
    "foreign": ("quire_kvstore_tier_foreign_total", "Files found in the tier's folder that are none of ours."),
    "errors": ("quire_kvstore_tier_errors_total", "Operations that the medium refused or did not finish."),
    "bytes_read": ("quire_kvstore_tier_read_bytes_total", "Bytes of pages read from below memory."),
    "bytes_written": ("quire_kvstore_tier_written_bytes_total", "Bytes of pages written below memory."),
}


class StoreMetrics:
    """Counters grow by what happened since the last update."""

    def __init__(self) -> None:
        self._counters = {
            "hits": counter("quire_kvstore_hits_total", "Pages looked up and found."),
            "misses": counter("quire_kvstore_misses_total", "Pages looked up and not found."),
            "stored": counter("quire_kvstore_stored_total", "Pages put."),
            "refused": counter("quire_kvstore_refused_total", "Pages put in vain: no room, incomplete or corrupt."),
            "corrupt": counter("quire_kvstore_corrupt_total", "Pages put wrong, or gone wrong in memory."),
        }
        self._tier_counters = {
            figure: counter(name, text, ("medium",)) for figure, (name, text) in _TIER_COUNTERS.items()
        }
        self._tier_gauges = {
            name: gauge(f"quire_kvstore_{name}", text, ("medium",))
            for name, text in (
                ("pages", "Visible pages."),
                ("used_bytes", "Room taken."),
                ("capacity_bytes", "All room."),
                ("available", "1 while the tier works."),
            )
        }
        self._gauges = {
            name: gauge(f"quire_kvstore_{name}", text)
            for name, text in (
                ("leases", "Leases of lookups."),
                ("pending_puts", "Puts under way."),
                ("pending_bytes", "Memory of puts under way."),
                ("watchers", "Watch streams."),
            )
        }
        self._last = StoreCounts()
        self._last_of_tier: dict[str, TierFigures] = {}

    def update(self, stats: StoreStats) -> None:
        """Set the gauges to these figures, and add to the counters what has grown since the last call; the same for
        each tier."""
        for name, metric in self._counters.items():
            metric.inc(getattr(stats.counts, name) - getattr(self._last, name))
        self._last = dataclasses.replace(stats.counts)
        for name, value in self._gauges.items():
            value.set(getattr(stats, name))
        for tier in stats.tiers:
            self._update_tier(tier)

    def _update_tier(self, tier: TierStats) -> None:
        """Set one tier's gauges to these figures, and add to its counters what has grown since the last call, under the
        tier's name."""
        last = self._last_of_tier.get(tier.name, TierFigures())
        for figure, metric in self._tier_counters.items():
            metric.labels(tier.name).inc(getattr(tier.figures, figure) - getattr(last, figure))
        self._last_of_tier[tier.name] = tier.figures
        for name, value in self._tier_gauges.items():
            value.labels(tier.name).set(getattr(tier, name))
