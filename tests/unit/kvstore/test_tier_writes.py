"""Tier: the fate of pages whose write fails or that are offered too late."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import pytest

from quire_kvstore.tiers.tier import Tier, TierSettings
from tests.unit.kvstore.pages import chain
from tests.unit.kvstore.scripted_backend import ScriptedBackend

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from quire_common.pages import PageKey
    from quire_kvstore.tiers.backend import PageJob

KEYS = chain("a", 3).keys()
SETTINGS = TierSettings(write_at=0, read_threads=1, write_threads=1, read_queue=10, write_queue=10)


class FailingBackend(ScriptedBackend):
    """Raises when the page `bad` is written, and notes what is refreshed."""

    def __init__(self, bad: PageKey) -> None:
        super().__init__()
        self._bad = bad
        self.refreshed: list[PageKey] = []

    def write(self, pages: Sequence[tuple[PageJob, memoryview]]) -> int:
        if any(job.key == self._bad for job, _ in pages):
            raise RuntimeError("a medium with a bug")
        return super().write(pages)

    def refresh(self, keys: Iterable[PageKey]) -> None:
        self.refreshed += keys


class PagesInRam:
    """Implements TierCallbacks, with all pages in RAM."""

    def allocate_buffer(self, job: PageJob, size: int) -> memoryview | None:
        return None

    def on_page_read(self, job: PageJob) -> None:
        pass

    def on_page_missed(self, job: PageJob) -> None:
        pass

    @contextlib.contextmanager
    def borrow_page(self, key: PageKey) -> Iterator[memoryview | None]:
        yield memoryview(b"page")

    def on_pages_removed(self, keys: Sequence[PageKey]) -> None:
        pass

    def on_pages_found(self) -> None:
        pass


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_an_offer_with_a_failed_write_is_refreshed_and_its_lost_page_is_counted(bad: int) -> None:
    backend = FailingBackend(KEYS[bad])
    tier = Tier(backend, SETTINGS)
    tier.start(PagesInRam())
    tier.offer_pages(KEYS)
    assert tier.flush(30)
    assert tier.close(30)
    assert set(backend.held) == set(KEYS) - {KEYS[bad]}
    assert backend.refreshed == list(reversed(KEYS))
    counts = backend.counts.snapshot()
    assert (counts.stored, counts.dropped, counts.errors) == (2, 1, 1)


def test_pages_that_are_offered_after_close_are_dropped() -> None:
    backend = ScriptedBackend()
    tier = Tier(backend, SETTINGS)
    tier.start(PagesInRam())
    assert tier.close(30)
    tier.offer_pages(KEYS)
    assert tier.flush(0.1), "nothing waits to be written"
    assert backend.counts.snapshot().dropped == len(KEYS)
