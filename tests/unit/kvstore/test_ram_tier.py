"""RamTier: a page that is being read stays in memory."""

from __future__ import annotations

from quire_kvstore.ram_tier import RamTier
from tests.unit.kvstore.pages import FRAMED_BYTES, PLACE_BYTES, chain

KEY = chain("a", 1).key(0)


def test_reading_a_dropped_page_does_not_expose_a_newer_page_of_its_key_to_eviction() -> None:
    ram = RamTier(2 * PLACE_BYTES)
    places = [ram.reserve(FRAMED_BYTES) for _ in range(2)]
    assert places[0] is not None and places[1] is not None
    dropped = ram.publish(KEY, places[0], FRAMED_BYTES, pinned=True)
    ram.drop_page(dropped)
    newer = ram.publish(KEY, places[1], FRAMED_BYTES)
    ram.acquire_page(newer)
    ram.acquire_page(dropped)
    ram.check_integrity({dropped: 1}, {})
    ram.release_page(dropped)
    assert ram.reserve(FRAMED_BYTES) is None, "both pages are in use"
    assert ram.get(KEY) is newer
    ram.release_page(newer)
    ram.unpin([dropped])
    ram.check_integrity({}, {})
    ram.close()
