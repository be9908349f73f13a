"""MemoryStore: what a value leaves behind that is too large."""

from __future__ import annotations

from quire_common.telemetry.metrics import registry
from quire_router.front.http.responses.store import MemoryStore, StoreOutcome


async def test_a_value_that_is_too_large_leaves_the_earlier_one_and_the_gauge_as_they_are() -> None:
    store = MemoryStore(100, 60.0, lambda tenant: 50 if tenant == "small" else 0)
    for tenant, size in (("small", 50), ("other", 50)):
        assert await store.put(tenant, "a", bytes(size)) is StoreOutcome.KEPT
        assert await store.put(tenant, "a", bytes(2 * size + 1)) is StoreOutcome.TOO_LARGE
        assert await store.get(tenant, "a") == bytes(size)
    assert registry.get_sample_value("quire_router_responses_kept_bytes") == 100
    assert await store.put("other", "a", bytes(40)) is StoreOutcome.KEPT, "the earlier value leaves its room"
    assert registry.get_sample_value("quire_router_responses_kept_bytes") == 90
