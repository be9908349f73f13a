"""The store's figures: what happened since the start, and a moment's picture. Knows nothing of how they are told."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire_kvstore.tiers.medium import TierFigures

if TYPE_CHECKING:
    from collections.abc import Sequence

    from quire_kvstore.prefetch import Prefetch
    from quire_kvstore.tiers.medium import Medium


@dataclass
class StoreCounts:
    """In pages; `refused` were put but did not become visible, `corrupt` were put wrong or went wrong in memory."""

    hits: int = 0
    misses: int = 0
    stored: int = 0
    refused: int = 0
    corrupt: int = 0


@dataclass(frozen=True)
class TierPicture:
    """One tier, RAM or below. What one tier misses is asked of the next; its `misses` are what it did not answer."""

    medium: str
    pages: int
    used_bytes: int
    capacity_bytes: int
    available: bool
    figures: TierFigures


@dataclass(frozen=True)
class StoreStats:
    """A moment's picture. Pages and bytes without a tier's name are those of RAM."""

    counts: StoreCounts
    pages: int
    used_bytes: int
    capacity_bytes: int
    evictions: int
    leases: int
    pending_puts: int
    pending_bytes: int
    watchers: int
    tiers: tuple[TierPicture, ...] = ()


class FoundCounts:
    """Where lookups found their pages. `media`: the fastest first."""

    def __init__(self, media: Sequence[str]) -> None:
        self._media = {medium: TierFigures() for medium in media}

    def count(self, prefetch: Prefetch, found: int) -> None:
        """A lookup was answered with so many pages; what one tier did not answer was asked of the next."""
        asked = len(prefetch.keys)
        for medium, figures in self._media.items():
            hits = sum(prefetch.media[index] == medium for index in range(found))
            asked -= hits
            figures.hits += hits
            figures.misses += asked

    def slowest(self, prefetch: Prefetch, found: int) -> str:
        """Of the media that the first pages came from."""
        used = {prefetch.media[index] for index in range(found)}
        return next(medium for medium in reversed(self._media) if medium in used)

    def of(self, medium: str, figures: TierFigures) -> TierFigures:
        """A tier's own figures with what lookups found there."""
        found = self._media[medium]
        return dataclasses.replace(figures, hits=found.hits, misses=found.misses)

    def picture(self, medium: Medium) -> TierPicture:
        """Of a tier below RAM."""
        figures = self.of(medium.name, medium.counts.now())
        sizes = (medium.pages, medium.used_bytes, medium.capacity_bytes)
        return TierPicture(medium.name, *sizes, medium.available, figures)
