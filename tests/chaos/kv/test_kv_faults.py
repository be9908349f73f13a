"""The caches killed, starved and spoiled under load: every answer is that of a stack without any, nothing is kept."""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
import socket
import time
import urllib.request
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest

from quire import AsyncClient, RequestOutput, SamplingParams
from quire.v1 import kvstore_pb2
from quire_common.pages import HEADER_BYTES
from quire_common.sequence import Sampling, Stop
from quire_worker.paced.answer import paced_tokens
from quire_worker.paced.facts import read_facts
from tests.chaos.kv.kv_rig import STREAMS, assert_at_rest, caching, cold, kv_stats, scripts, tier, until
from tests.chaos.load import Load
from tests.chaos.rig import LIMIT_S, POLL_S, Rig
from tests.redis_server import RedisServer, redis_server

__all__ = ["redis_server"]
Stats = kvstore_pb2.StatsResponse
# Memory of a kvstore that must use what is below it: some sixty pages.
_FEW = {"cpu": 60 * 140_000, "paced 5": 64 << 10}
PAGE = 16


@asynccontextmanager
async def disturbed(engine: str, kvstore: dict[str, str], seed: int) -> AsyncIterator[tuple[Rig, Load]]:
    """A stack under load; when it is left, all must have been answered as without a cache, and nothing may be kept."""
    references = await cold(engine)
    async with Rig(engine, flags=caching(engine, kvstore)) as rig:
        load = Load(rig, STREAMS, seed, references)
        load.start()
        try:
            yield rig, load
        finally:
            await load.finish()
        print(f"{load.answers} answers, {load.tokens} tokens, {len(load.failures)} bad, deaths {rig.stack.deaths}")
        assert not load.failures, "\n".join(load.failures[:20])
        assert load.answers >= STREAMS
        await assert_at_rest(rig)
        print(f"kvstore: {kv_stats(rig)}")


async def kill(rig: Rig, member: str) -> None:
    """SIGKILL, and wait for its successor."""
    process = rig.service(member).process
    assert process.signal(signal.SIGKILL)
    deadline = time.monotonic() + LIMIT_S
    while rig.service(member).process == process or not rig.serves(member):
        assert time.monotonic() < deadline, f"{member} does not come back"
        await asyncio.sleep(POLL_S)


@pytest.mark.parametrize("kills", [pytest.param(1, marks=pytest.mark.deep), pytest.param(10, marks=pytest.mark.slow)])
async def test_killed_kvstore_costs_cache_hits_alone(seed: int, kills: int) -> None:
    async with disturbed("paced 5", {"disk-path": ""}, seed) as (rig, load):
        for _ in range(kills):
            assert await until(rig, lambda stats: tier(stats, "ram").stored > 0)
            answered = load.answers
            await kill(rig, "kvstore")
            deadline = time.monotonic() + LIMIT_S
            while load.answers < answered + STREAMS:
                assert time.monotonic() < deadline
                await asyncio.sleep(POLL_S)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("victim", "moment"),
    [
        pytest.param("kvstore", lambda stats: stats.pending_puts > 0, id="kvstore-during-a-put"),
        pytest.param("kvstore", lambda stats: stats.leases > 0, id="kvstore-while-leases-are-out"),
        pytest.param("worker-1", lambda stats: stats.leases > 0, id="worker-while-leases-are-out"),
        pytest.param("scheduler-1", lambda stats: stats.leases > 0, id="scheduler-while-leases-are-out"),
    ],
)
async def test_streams_survive_kills_while_pages_move(seed: int, victim: str, moment: Callable[[Stats], bool]) -> None:
    async with disturbed("cpu", {"disk-path": ""}, seed) as (rig, load):
        for _ in range(4):
            assert await until(rig, moment), f"the moment never came: {kv_stats(rig)}"
            await kill(rig, victim)
        answered = load.answers
        assert await until(rig, lambda stats: tier(stats, "ram").hits > 0 and load.answers > answered)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["paced 5", "cpu"])
async def test_streams_survive_redis_freezes_and_restarts(seed: int, engine: str, redis_server: RedisServer) -> None:
    flags = {"disk-path": "", "ram-bytes": str(_FEW[engine]), "redis-url": redis_server.url}
    async with disturbed(engine, flags, seed) as (rig, _):
        assert await until(rig, lambda stats: tier(stats, "redis").hits > 0)
        redis_server.freeze()
        assert await until(rig, lambda stats: not tier(stats, "redis").available)
        redis_server.thaw()
        assert await until(rig, lambda stats: tier(stats, "redis").available)
        redis_server.stop()
        assert await until(rig, lambda stats: not tier(stats, "redis").available)
        redis_server.start()
        assert await until(rig, lambda stats: tier(stats, "redis").available)
        # It is empty now: what is missed is computed, and written there again.
        before = kv_stats(rig)
        assert before is not None
        assert await until(rig, lambda stats: tier(stats, "redis").stored > tier(before, "redis").stored)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["paced 5", "cpu"])
async def test_damaged_page_files_are_noticed(seed: int, engine: str, tmp_path: Path) -> None:
    flags = {"disk-path": str(tmp_path / "pages"), "ram-bytes": str(_FEW[engine])}
    async with disturbed(engine, flags, seed) as (rig, _):
        assert await until(rig, lambda stats: tier(stats, "disk").hits > 0)
        for _ in range(20):
            for number, file in enumerate(_page_files(Path(flags["disk-path"]))):
                _spoil(file, number)
            if await until(rig, lambda stats: tier(stats, "disk").corrupt > 2, 1.0):
                break
        stats = kv_stats(rig)
        assert stats is not None and tier(stats, "disk").corrupt > 2


@pytest.mark.deep
async def test_replicas_share_pages_through_the_kvstore() -> None:
    """Two that share a kvstore, the one that served it hangs when it is asked again."""
    ports = {f"scheduler-{number}": free_port() for number in (1, 2)}
    flags = caching("paced 5", {"disk-path": ""})
    flags["scheduler"] = {"kvstore-timeout-ms": "20000"}  # that it is found is the subject, not how soon
    flags |= {name: {"metrics-listen": f"127.0.0.1:{port}"} for name, port in ports.items()}
    script = next(script for script in scripts("paced 5") if not script.temperature)
    params = SamplingParams(temperature=0.0, max_tokens=script.max_tokens)
    async with Rig("paced 5", flags=flags) as rig:
        async with AsyncClient(rig.stack.grpc) as client:
            first, served = await answer_that_is_stored(rig, client, script.prompt, params, ports)
            process = rig.service(served).process
            assert process.signal(signal.SIGSTOP)
            try:
                second = await client.complete(first.prompt_token_ids, params)
            finally:
                process.signal(signal.SIGCONT)
        pure = paced_tokens(
            first.prompt_token_ids, Stop(script.max_tokens), Sampling(), facts=read_facts(rig.stack.spec.model)
        )
        assert first.outputs[0].token_ids == second.outputs[0].token_ids == pure.tokens
        assert first.num_cached_tokens == 0
        assert second.num_cached_tokens == (len(first.prompt_token_ids) - 1) // PAGE * PAGE
        await assert_at_rest(rig)


async def answer_that_is_stored(
    rig: Rig, client: AsyncClient, prompt: str, params: SamplingParams, ports: dict[str, int]
) -> tuple[RequestOutput, str]:
    """And who gave it. Pages that cannot be stored at once are dropped: then a prompt like it is tried."""
    for attempt in range(5):
        asked = {name: await asyncio.to_thread(_prompt_tokens, port) for name, port in ports.items()}
        stats = kv_stats(rig)
        stored = tier(stats, "ram").stored if stats is not None else 0
        answer = await client.complete(f"{attempt} {prompt}", params)
        wanted = stored + len(answer.prompt_token_ids) // PAGE
        if await until(rig, partial(_has_stored, wanted), 10.0):
            (served,) = [
                name for name, port in ports.items() if await asyncio.to_thread(_prompt_tokens, port) > asked[name]
            ]
            return answer, served
    raise AssertionError("nothing is stored")


def _has_stored(pages: int, stats: Stats) -> bool:
    return tier(stats, "ram").stored >= pages


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def _prompt_tokens(port: int) -> float:
    """That this scheduler has started."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=LIMIT_S) as answer:
        text = answer.read().decode()
    found = re.search(r"^quire_scheduler_prompt_tokens_total\S* ([0-9.e+]+)$", text, re.MULTILINE)
    assert found is not None
    return float(found[1])


def _page_files(folder: Path) -> list[Path]:
    return [file for file in folder.rglob("*") if file.is_file() and file.stat().st_size > HEADER_BYTES]


def _spoil(file: Path, number: int) -> None:
    """A byte of the body, of the header, or the end."""
    with contextlib.suppress(FileNotFoundError), file.open("r+b") as page:
        size = file.stat().st_size
        if number % 3 == 2:
            page.truncate(size // 2)
            return
        page.seek(40 if number % 3 else size - 7)
        byte = page.read(1)
        page.seek(-1, 1)
        page.write(bytes([byte[0] ^ 0x10]))
