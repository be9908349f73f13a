"""Frames of page events from the wire."""

from __future__ import annotations

from quire.v1 import common_pb2
from quire_router.pages.page_holder import Pool
from quire_router.pages.page_stream import update_from_pb


def test_pages_of_one_pool_are_joined_in_their_order() -> None:
    frame = common_pb2.PageEvents(sequence=4, first_sequence=2)
    for namespace, group, number in ((b"a", 0, 1), (b"a", 1, 2), (b"a", 0, 3), (b"b", 0, 4)):
        frame.stored.add(namespace=namespace, group=group, hashes=[bytes([number]) * 32, bytes([number + 8]) * 32])
        frame.removed_pages.add(namespace=namespace, group=group, hashes=[bytes([number + 16]) * 32])
    update = update_from_pb(frame)
    assert update.stored == [
        Pool(b"a", 0, [bytes([number]) * 32 for number in (1, 9, 3, 11)]),
        Pool(b"a", 1, [bytes([number]) * 32 for number in (2, 10)]),
        Pool(b"b", 0, [bytes([number]) * 32 for number in (4, 12)]),
    ]
    assert [pool.hashes for pool in update.removed] == [
        [bytes([17]) * 32, bytes([19]) * 32],
        [bytes([18]) * 32],
        [bytes([20]) * 32],
    ]
