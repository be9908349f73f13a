"""What may befall the kvstore's tiers, one row after the other: nobody who asks notices, and nothing is kept.

Each row asks, so that pages are stored, does its harm, and asks again. Every answer is compared with the undisturbed
one.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from redis import Redis

from quire.models import find_model
from quire_common.pages import HEADER_BYTES, PageExtras, PageHeader, PageKey, PageRun, chain_hashes, frame_page
from quire_kvstore.tiers.redis_backend import PREFIX
from tests.chaos.kv.tier_rig import TierRig, prompts, tier
from tests.chaos.spoil import spoil_memory
from tests.contract.kvstore.kvstore_process import Connection, KvstoreProcess
from tests.redis_proxy import RedisProxy
from tests.redis_server import RedisServer, redis_server

__all__ = ["redis_server"]
pytestmark = pytest.mark.slow
FIRST, SECOND = prompts("FIRST"), prompts("SECOND")


@contextlib.contextmanager
def small_disk(folder: Path, size: str = "240k") -> Iterator[Path]:
    """A filesystem of its own, which can be full and read-only."""
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("mounting needs root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def remount(folder: Path, way: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{way}", folder], check=True)


def disk_flags(folder: Path) -> dict[str, str]:
    return {"disk-path": str(folder), "disk-bytes": str(1 << 30)}


async def test_full_disk_costs_no_answer(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as folder:
        async with TierRig(disk_flags(folder)) as rig:
            await rig.ask(FIRST)
            disk = await rig.until_tier("disk", lambda disk: disk.dropped and disk.errors)
            assert disk.bytes <= 240 << 10
            await rig.ask(FIRST)
            await rig.ask(SECOND)
            await rig.ask(FIRST + SECOND)


async def test_read_only_disk_costs_no_answer(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "100m") as folder:
        async with TierRig(disk_flags(folder)) as rig:
            await rig.ask(FIRST)
            await rig.until_tier("disk", lambda disk: disk.stored >= 60)
            remount(folder, "ro")
            await rig.ask_until(FIRST, "disk", lambda disk: disk.hits)
            await rig.ask(SECOND)
            await rig.until_tier("disk", lambda disk: disk.dropped and not disk.available)
            await rig.ask(FIRST + SECOND)
            remount(folder, "rw")
            await rig.ask_until(prompts("THIRD"), "disk", lambda disk: disk.available)


def files_of(folder: Path) -> list[Path]:
    return list(folder.rglob("*.page"))


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[HEADER_BYTES + 3] ^= 1
    file.write_bytes(data)


def other_namespace(data: bytes) -> bytes:
    """The same page, as another model's: whole, with a right checksum."""
    header = PageHeader.unpack(data)
    body = data[HEADER_BYTES : HEADER_BYTES + header.length]
    key = PageKey(bytes(32), header.key.hash, header.key.group)
    return (frame_page(key, header.dtype, body) + body).ljust(len(data), b"\0")


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("a corrupted byte", flip),
        ("truncated", lambda file: os.truncate(file, 100)),
        ("another namespace", lambda file: file.write_bytes(other_namespace(file.read_bytes()))),
        ("a foreign file", lambda file: file.write_bytes(os.urandom(4096))),
    ],
)
@pytest.mark.parametrize("lives", ["one life", "two lives"])
async def test_damaged_page_files_cost_no_answer(
    tmp_path: Path, name: str, damage: Callable[[Path], object], lives: str
) -> None:
    """Under a kvstore that knows them, and under one that finds them."""
    async with TierRig(disk_flags(tmp_path)) as rig:
        await rig.ask(FIRST)
        await rig.until_tier("disk", lambda disk: disk.pages >= 60)
        for file in files_of(tmp_path):
            damage(file)
        (tmp_path / "README").write_text("not a page")
        if lives == "two lives":
            await rig.lose_memory()
        await rig.ask_until(FIRST, "disk", lambda disk: disk.corrupt)
        await rig.ask(FIRST)
        assert (tmp_path / "README").read_text() == "not a page"


async def test_damaged_page_memory_costs_no_answer() -> None:
    async with TierRig({"ram-bytes": str(1 << 22)}) as rig:
        await rig.ask(FIRST)
        await rig.until_tier("ram", lambda ram: ram.pages >= 60)
        assert spoil_memory(rig.service("kvstore").pid) >= 60
        await rig.ask_until(FIRST, "ram", lambda ram: ram.corrupt)
        await rig.ask(FIRST)


def redis_flags(url: str) -> dict[str, str]:
    return {"redis-url": url, "redis-timeout-ms": "200"}


@pytest.mark.parametrize("name", ["a corrupted byte", "truncated", "another namespace", "foreign"])
async def test_damaged_redis_values_cost_no_answer(redis_server: RedisServer, name: str) -> None:
    async with TierRig(redis_flags(redis_server.url)) as rig:
        await rig.until_tier("redis", lambda redis: redis.available)
        await rig.ask(FIRST)
        await rig.until_tier("redis", lambda redis: redis.stored >= 60)
        with Redis.from_url(redis_server.url) as redis:
            for key in redis.scan_iter(match=PREFIX + b"*", count=1000):
                page = redis.get(key)
                assert isinstance(page, bytes)
                flipped = page[:-1] + bytes([page[-1] ^ 1])
                wrong = {"a corrupted byte": flipped, "truncated": page[:99], "foreign": os.urandom(50)}
                redis.set(key, wrong.get(name) or other_namespace(page))
        await rig.ask_until(FIRST, "redis", lambda redis: redis.corrupt)
        await rig.ask(FIRST)


async def test_redis_may_be_missing_at_the_start(redis_server: RedisServer) -> None:
    redis_server.stop()
    async with TierRig(redis_flags(redis_server.url)) as rig:
        await rig.ask(FIRST)
        assert not tier(await rig.until(lambda _: True), "redis").available
        redis_server.start()
        await rig.until_tier("redis", lambda redis: redis.available)
        await rig.ask_until(SECOND, "redis", lambda redis: redis.stored)


async def test_redis_tier_returns_after_a_restart(redis_server: RedisServer) -> None:
    async with TierRig(redis_flags(redis_server.url)) as rig:
        await rig.until_tier("redis", lambda redis: redis.available)
        await rig.ask(FIRST)
        await rig.until_tier("redis", lambda redis: redis.stored >= 60)
        redis_server.stop()
        await rig.ask_until(FIRST, "redis", lambda redis: redis.errors)
        redis_server.start()
        await rig.until_tier("redis", lambda redis: redis.available)
        await rig.ask(FIRST + SECOND)


@pytest.mark.parametrize("mode", ["silent", "slow", "garbage"])
async def test_slow_or_broken_redis_costs_no_answer(redis_server: RedisServer, mode: str) -> None:
    with RedisProxy(redis_server.port) as proxy:
        async with TierRig(redis_flags(proxy.url)) as rig:
            await rig.until_tier("redis", lambda redis: redis.available)
            await rig.ask(FIRST)
            await rig.until_tier("redis", lambda redis: redis.stored >= 60)
            proxy.mode = mode
            await rig.ask_until(FIRST, "redis", lambda redis: redis.errors)
            await rig.ask(FIRST + SECOND)
            proxy.mode = "pass"
            await rig.until_tier("redis", lambda redis: redis.available)
            await rig.ask_until(FIRST, "redis", lambda redis: redis.hits)


async def test_two_models_of_one_name_share_nothing(tmp_path: Path, redis_server: RedisServer) -> None:
    """The same tokenizer and pages of the same size, by other weights, over one Redis."""
    twin = tmp_path / "demo"
    shutil.copytree(find_model(None), twin, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((twin / "config.json").read_text())
    (twin / "config.json").write_text(json.dumps({**config, "vocab_size": config["vocab_size"] - 1}))
    async with TierRig(redis_flags(redis_server.url)) as rig:
        await rig.until_tier("redis", lambda redis: redis.available)
        await rig.ask(FIRST)
        await rig.until_tier("redis", lambda redis: redis.stored >= 60)
    async with TierRig(redis_flags(redis_server.url), model=str(twin)) as rig:
        await rig.until_tier("redis", lambda redis: redis.available)
        await rig.ask(FIRST)
        stats = await rig.until_tier("redis", lambda redis: redis.stored >= 60)
        assert (stats.hits, stats.corrupt) == (0, 0)
    async with TierRig(redis_flags(redis_server.url)) as rig:
        await rig.until_tier("redis", lambda redis: redis.available)
        await rig.ask(FIRST)
        assert tier(await rig.until(lambda _: True), "redis").hits >= 60


async def test_tenants_share_nothing() -> None:
    async with TierRig({"ram-bytes": str(1 << 22)}, keys=("key-one", "key-two")) as rig:
        before = (await rig.until_tier("ram", lambda _: True)).pages
        await rig.ask(FIRST, "key-one")
        stored = (await rig.until_tier("ram", lambda ram: ram.pages >= before + 60)).pages - before
        await rig.ask(FIRST, "key-two")
        ram = await rig.until_tier("ram", lambda ram: ram.pages >= before + 2 * stored)
        assert ram.hits == 0
        await rig.ask_until(FIRST, "ram", lambda ram: ram.hits >= stored, "key-one")


def test_adapter_and_salt_of_equal_text_share_nothing() -> None:
    process = KvstoreProcess()
    process.wait_ready()
    tokens, text = list(range(64)), b"x" * 32
    runs = {
        extras: PageRun(bytes(32), 0, tuple(chain_hashes(tokens, 16, extras)))
        for extras in (PageExtras(adapter=text), PageExtras(salt=text.decode()), PageExtras(adapter=text, salt="x"))
    }
    bodies = [[bytes([number]) * 64] * 4 for number in range(len(runs))]
    with Connection(process.address) as connection:
        for number, run in enumerate(runs.values()):
            assert connection.client.lookup(run).pages == 0, "what others put is not this one's"
            assert connection.client.put_pages(run, "uint8", 64, bodies[number].__getitem__).stored == 4
        for number, run in enumerate(runs.values()):
            lookup = connection.client.lookup(run)
            for _, page in connection.client.get_pages(lookup.lease):
                assert page[HEADER_BYTES:] == bodies[number][0]
    assert process.stop() == 0
