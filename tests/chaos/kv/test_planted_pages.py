"""Whoever can write to the kvstore's Redis or to its disk plants pages there: with the cluster's key no answer is
another one. Each planted page has a right checksum and the name of a page that is asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from quire_common.pages import HEADER_BYTES, PageHeader, PageKey, frame_page
from quire_kvstore.tiers.redis_backend import PREFIX
from tests.chaos.kv.tier_rig import TierRig, prompts
from tests.redis_server import RedisServer, redis_server

__all__ = ["redis_server"]
pytestmark = pytest.mark.slow
FIRST, SECOND = prompts("FIRST"), prompts("SECOND")
KEY = "5f" * 32
Plant = Callable[[bytes, bytes], bytes]


def body_of(page: bytes) -> bytes:
    return page[HEADER_BYTES : HEADER_BYTES + PageHeader.unpack(page).length]


def framed_as(key: PageKey, page: bytes, body: bytes, mac_of: bytes) -> bytes:
    """A page of this name and body, with a right checksum, and with the MAC that another page has."""
    head = bytearray(frame_page(key, PageHeader.unpack(page).dtype, body))
    head[14:16], head[104:120] = mac_of[14:16], mac_of[104:120]
    return bytes(head) + body


def other_bytes(page: bytes, another: bytes) -> bytes:
    """Every byte is another, and there is no MAC."""
    key = PageHeader.unpack(page).key
    return framed_as(key, page, bytes(byte ^ 0x55 for byte in body_of(page)), bytes(HEADER_BYTES))


def old_mac(page: bytes, another: bytes) -> bytes:
    """Every byte is another, under the MAC that was there."""
    key = PageHeader.unpack(page).key
    return framed_as(key, page, bytes(byte ^ 0x55 for byte in body_of(page)), page)


def renamed(page: bytes, another: bytes) -> bytes:
    """Another page of ours, with its own MAC, under this page's name."""
    return framed_as(PageHeader.unpack(page).key, page, body_of(another), another)


PLANTS = [other_bytes, old_mac, renamed]


def plant_files(folder: Path, plant: Plant) -> None:
    files = sorted(folder.rglob("*.page"))
    pages = [file.read_bytes() for file in files]
    for number, (file, page) in enumerate(zip(files, pages, strict=True)):
        file.write_bytes(plant(page, pages[number - 1]).ljust(len(page), b"\0"))


def plant_values(redis: Any, plant: Plant) -> None:
    keys = sorted(redis.scan_iter(match=PREFIX + b"*", count=1000))
    pages = [redis.get(key) for key in keys]
    for number, (key, page) in enumerate(zip(keys, pages, strict=True)):
        redis.set(key, plant(page, pages[number - 1]))


@pytest.fixture
def key_file(tmp_path: Path) -> Iterator[dict[str, str]]:
    file = tmp_path / "page_mac_key"
    file.write_text(KEY)
    yield {"page-mac-key-file": str(file)}


@pytest.mark.parametrize("plant", PLANTS)
@pytest.mark.parametrize("lives", ["one life", "two lives"])
async def test_pages_planted_on_the_disk_cost_no_answer(
    tmp_path: Path, key_file: dict[str, str], plant: Plant, lives: str
) -> None:
    """Under a kvstore that wrote pages there, and under one that finds them."""
    folder = tmp_path / "disk"
    async with TierRig({"disk-path": str(folder), "disk-bytes": str(1 << 30)}, shared=key_file) as rig:
        await rig.ask(FIRST)
        await rig.until_tier("disk", lambda disk: disk.pages >= 60)
        plant_files(folder, plant)
        if lives == "two lives":
            await rig.lose_memory()
        await rig.ask(FIRST)
        found = await rig.ask_until(FIRST, "disk", lambda disk: disk.hits)
        assert found.corrupt > 0
        await rig.ask(FIRST + SECOND)


@pytest.mark.parametrize("plant", PLANTS)
async def test_pages_planted_in_redis_cost_no_answer(
    redis_server: RedisServer, key_file: dict[str, str], plant: Plant
) -> None:
    flags = {"redis-url": redis_server.url, "redis-timeout-ms": "2000"}
    async with TierRig(flags, shared=key_file) as rig:
        await rig.until_tier("redis", lambda redis: redis.available)
        await rig.ask(FIRST)
        await rig.until_tier("redis", lambda redis: redis.stored >= 60)
        with Redis.from_url(redis_server.url) as redis:
            plant_values(redis, plant)
        await rig.ask(FIRST)
        found = await rig.ask_until(FIRST, "redis", lambda redis: redis.hits)
        assert found.corrupt > 0
        await rig.ask(FIRST + SECOND)


async def test_without_a_key_a_planted_page_is_believed(tmp_path: Path) -> None:
    """What the key is for."""
    folder = tmp_path / "disk"
    async with TierRig({"disk-path": str(folder), "disk-bytes": str(1 << 30)}) as rig:
        await rig.ask(FIRST)
        await rig.until_tier("disk", lambda disk: disk.pages >= 60)
        plant_files(folder, other_bytes)
        await rig.lose_memory()
        with pytest.raises(AssertionError, match="FIRST"):
            await rig.ask_until(FIRST, "disk", lambda disk: False)
