"""The store's figures: counts since the start, and a snapshot of its fill. This module does not know how they are
reported."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire_kvstore.tiers.backend import TierFigures

if TYPE_CHECKING:
    from collections.abc import Sequence

    from quire_kvstore.prefetch import Prefetch
    from quire_kvstore.tiers.backend import TierBackend


@dataclass
class StoreCounts:
    """Counts of pages. `refused` pages were to be put but did not become visible, also for lack of room. `corrupt`
    pages were damaged when they were put, or later in memory."""

    hits: int = 0
    misses: int = 0
    stored: int = 0
    refused: int = 0
    corrupt: int = 0

    def add_lookup(self, found: int, asked: int) -> None:
        """Count a lookup that was answered."""
        self.hits += found
        self.misses += asked - found

    def add_put(self, stored: int, refused: int, corrupt: int = 0) -> None:
        """Count pages of a put, some of which have become visible."""
        self.stored += stored
        self.refused += refused
        self.corrupt += corrupt


@dataclass(frozen=True)
class TierStats:
    """The figures of one tier, RAM or below. A page that one tier misses is requested from the next; `misses` counts
    the pages that neither this tier nor a faster one supplied."""

    name: str
    pages: int
    used_bytes: int
    capacity_bytes: int
    available: bool
    figures: TierFigures


@dataclass(frozen=True)
class StoreStats:
    """A snapshot of the store. Figures of pages and bytes without a tier's name are those of RAM."""

    counts: StoreCounts
    pages: int
    used_bytes: int
    capacity_bytes: int
    evictions: int
    leases: int
    pending_puts: int
    pending_bytes: int
    watchers: int
    tiers: tuple[TierStats, ...] = ()


class LookupCounts:
    """Counts of the tiers in which lookups found their pages. `tier_names`: the fastest first."""

    def __init__(self, tier_names: Sequence[str]) -> None:
        self._by_tier = {tier: TierFigures() for tier in tier_names}

    def count(self, prefetch: Prefetch, found: int) -> None:
        """Count a lookup that was answered with `found` pages. Each of these is a hit of the tier that it came from.
        For each tier, every page of the run that neither it nor a faster tier supplied is a miss, also behind the end
        of the prefix."""
        asked = len(prefetch.keys)
        for tier, figures in self._by_tier.items():
            hits = sum(prefetch.tier_names[index] == tier for index in range(found))
            asked -= hits
            figures.hits += hits
            figures.misses += asked

    def slowest_tier(self, prefetch: Prefetch, found: int) -> str:
        """Return the name of the slowest of the tiers that the lookup's first `found` pages, at least one, came
        from."""
        used = {prefetch.tier_names[index] for index in range(found)}
        return next(tier for tier in reversed(self._by_tier) if tier in used)

    def with_lookups(self, tier: str, figures: TierFigures) -> TierFigures:
        """Return a copy of a tier's own figures, with the hits and misses that lookups counted for that tier."""
        found = self._by_tier[tier]
        return dataclasses.replace(figures, hits=found.hits, misses=found.misses)

    def tier_stats(self, backend: TierBackend) -> TierStats:
        """Return the fill, availability and counts of a tier below RAM, its lookups' hits and misses included."""
        figures = self.with_lookups(backend.name, backend.counts.snapshot())
        sizes = (backend.pages, backend.used_bytes, backend.capacity_bytes)
        return TierStats(backend.name, *sizes, backend.available, figures)
