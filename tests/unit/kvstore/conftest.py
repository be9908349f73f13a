"""A store per test, whose integrity is checked when the test ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from quire_kvstore.page_store import PageStore
from tests.unit.kvstore.pages import Clock, config

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    MakeStore = Callable[..., PageStore]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def make_store(clock: Clock) -> Iterator[MakeStore]:
    stores: list[PageStore] = []

    def make(pages: int = 8, **changes: object) -> PageStore:
        stores.append(PageStore(config(pages, **changes), clock))
        return stores[-1]

    yield make
    for store in stores:
        store.check_integrity()
        store.close()
