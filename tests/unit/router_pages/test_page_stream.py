"""Frames of page events from the wire, and the stream that gets them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from quire.v1 import common_pb2
from quire_common.errors import InvalidArgument
from quire_router.config import RouterConfig
from quire_router.pages.page_directory import PageDirectory
from quire_router.pages.page_holder import PageHolder, Pool
from quire_router.pages.page_stream import PageStream, update_from_pb


def frame_of(**fields: Any) -> common_pb2.PageEvents:
    return common_pb2.PageEvents(epoch=common_pb2.Epoch(boot_id=1, run=1), **fields)


class ScriptedStream(PageStream):
    """Each opening of the stream yields the next of `scripts`; the last one then stays open."""

    def __init__(self, scripts: list[list[common_pb2.PageEvents]], holder: PageHolder) -> None:
        super().__init__("scheduler", "s", "127.0.0.1:1", RouterConfig(), holder)
        self.scripts = scripts

    async def _frames(self, *_: Any) -> AsyncIterator[common_pb2.PageEvents]:
        for frame in self.scripts.pop(0):
            yield frame
        if not self.scripts:
            await asyncio.Event().wait()


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


@pytest.mark.parametrize("size", [0, 24, 31, 33, 64])
@pytest.mark.parametrize("field", ["stored", "removed_pages", "removed"])
def test_hash_of_another_length_is_malformed(field: str, size: int) -> None:
    hashes = [bytes(32), bytes(size)]
    part = hashes if field == "removed" else [{"namespace": b"a", "hashes": hashes}]
    with pytest.raises(InvalidArgument, match=f"BAD_PAGE_KEY: A page hash has {size} bytes"):
        update_from_pb(frame_of(sequence=1, **{field: part}))


async def test_stream_with_a_malformed_frame_is_opened_again() -> None:
    directory, known = PageDirectory(1000, 10.0), asyncio.Event()
    holder = PageHolder(directory, lambda _number, life: known.set() if life else None)
    bad = frame_of(sequence=1, snapshot=True, snapshot_complete=True, stored=[{"hashes": [b"x" * 31]}])
    good = frame_of(sequence=1, snapshot=True, snapshot_complete=True, stored=[{"hashes": [b"x" * 32]}])
    stream = ScriptedStream([[bad], [good]], holder)
    task = asyncio.create_task(stream.run())
    try:
        async with asyncio.timeout(10):
            await known.wait()
        assert directory.pages_of(holder.number) == 1
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert task.cancelled()
