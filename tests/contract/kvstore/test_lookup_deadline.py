"""A lookup waits for pages below memory until its deadline."""

from __future__ import annotations

from tests.unit.kvstore.pages import read_all
from tests.unit.kvstore.test_prefetch import LONG_S, A, holding, over
from tests.unit.kvstore.tiers import eventually, found


def test_the_deadline_keeps_what_has_come() -> None:
    backend = holding(A, free=False)
    with over(backend) as store:
        backend.allow(3)
        pages, lease = store.lookup(A, 0, pin=True, wait_s=1.5)
        assert pages == 3 and lease is not None
        for index in range(3):
            read_all(store, lease.id, A, index)
        store.release([lease.id])
        backend.release_all()
        eventually(lambda: store.stats().pages == 4)
        assert backend.reads == [A.key(index) for index in range(4)], "what had begun still comes, the rest is not read"
        assert found(store, A, wait_s=LONG_S) == (8, "scripted")
        assert len(backend.reads) == 8
