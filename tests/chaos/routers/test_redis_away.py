"""Redis hangs and is away for a minute, while two routers use it for all they can: nobody sees an error or waits.

Routers share nothing but Redis: neither files nor memory nor connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import httpx
import psutil
import pytest

from quire_common.discovery import Endpoint, make_discovery
from tests.fakes.fake_tokenizer import FakeTokenizer
from tests.fakes.grpc_host import GrpcHost
from tests.fakes.scheduler.fake_scheduler import FakeScheduler
from tests.redis_server import RedisServer, redis_server
from tests.router_process import RouterProcess

__all__ = ["redis_server"]
pytestmark = pytest.mark.slow
AWAY_S = float(os.environ.get("REDIS_AWAY_S", "60"))
MOST_LATER_S = 0.3
KEY = "a-key-with-limits"
CLIENTS = 4
# Mappings that only the process itself has: of its rings in the kernel, and of memory without a name.
_OWN = ("anon_inode:", "/dev/zero (deleted)")


@contextlib.asynccontextmanager
async def two_routers(redis: RedisServer) -> AsyncIterator[tuple[list[RouterProcess], set[int]]]:
    """Two routers that find their peers, count their keys' requests and keep their responses in Redis; and the ports of
    those whom they may talk to."""
    spec = f"{redis.url}?ttl_s=5&poll_s=0.2"
    flags = [f"--discovery={spec}", f"--redis={redis.url}", f"--api-key={KEY}"]
    flags += ["--requests-per-minute=1000000", "--tokens-per-minute=100000000"]
    async with contextlib.AsyncExitStack() as stack:
        hosts = {
            "scheduler": await stack.enter_async_context(GrpcHost(FakeScheduler(step_s=0.005).add)),
            "tokenizer": await stack.enter_async_context(GrpcHost(FakeTokenizer().add)),
        }
        discovery = make_discovery(spec, {})
        stack.push_async_callback(discovery.close)
        for service, host in hosts.items():
            await discovery.register(Endpoint(f"{service}-1", service, host.address))
        routers = [await stack.enter_async_context(RouterProcess(flags)) for _ in range(2)]
        yield routers, {redis.port, *(int(host.address.rpartition(":")[2]) for host in hosts.values())}


async def ask(client: httpx.AsyncClient, router: RouterProcess, number: int) -> float:
    """Ask for a completion or a response that is kept, by turns; return how long the answer took."""
    began = time.monotonic()
    if number % 2:
        answer = await client.post(f"{router.http}/v1/responses", json={"input": "ab", "max_output_tokens": 20})
    else:
        answer = await client.post(f"{router.http}/v1/completions", json={"prompt": "ab", "max_tokens": 20})
    assert answer.status_code == httpx.codes.OK, answer.text
    return time.monotonic() - began


async def ask_for(routers: Sequence[RouterProcess], seconds: float) -> list[float]:
    """How long each answer took; clients ask all the time, each of both routers by turns."""
    took: list[float] = []

    async def one(offset: int) -> None:
        ends = time.monotonic() + seconds
        headers = {"authorization": f"Bearer {KEY}"}
        async with httpx.AsyncClient(trust_env=False, timeout=60, headers=headers) as client:
            for number in itertools.count(offset):
                if time.monotonic() > ends:
                    return
                took.append(await ask(client, routers[number // 2 % 2], number))
                await asyncio.sleep(0.05)

    await asyncio.gather(*(one(offset) for offset in range(CLIENTS)))
    return took


async def test_redis_away_for_a_minute_costs_no_answer_300_ms(redis_server: RedisServer) -> None:
    async with two_routers(redis_server) as (routers, _):
        await ask_for(routers, 1.0)
        without = await ask_for(routers, 10.0)
        redis_server.freeze()
        hangs = await ask_for(routers, AWAY_S / 2)
        redis_server.stop()
        away = await ask_for(routers, AWAY_S / 2)
        await asyncio.to_thread(redis_server.start)
        back = await ask_for(routers, 3.0)
        for name, took in (("with Redis", without), ("hangs", hangs), ("away", away), ("back", back)):
            print(
                f"{name}: {len(took)} answers, median {sorted(took)[len(took) // 2]:.3f} s, longest {max(took):.3f} s"
            )
        assert max(*hangs, *away, *back) <= max(without) + MOST_LATER_S


async def test_routers_share_nothing_but_redis(redis_server: RedisServer) -> None:
    """No connection between routers, and none but to schedulers, tokenizers and Redis; no file that one writes and the
    other has open; no shared memory."""
    async with two_routers(redis_server) as (routers, peers):
        await ask_for(routers, 1.0)
        processes = [psutil.Process(router.process.pid) for router in routers if router.process is not None]
        own = [{router.http_port, router.grpc_port} for router in routers]
        dialled = []
        for process, ports in zip(processes, own, strict=True):
            connections = [c for c in process.net_connections("inet") if c.raddr]
            dialled.append({c.raddr.port for c in connections if c.laddr.port not in ports})
            assert not [c for c in process.net_connections("unix") if c.raddr]
        assert all(ports == peers for ports in dialled), f"{dialled} instead of {peers}"
        for one, other in itertools.permutations(processes):
            assert not written(one) & (written(other) | read(other))
        assert not [line for process in processes for line in shared_memory(process)]


def written(process: psutil.Process) -> set[str]:
    """Files that it may write to, but for its log."""
    files = {file.path for file in process.open_files() if file.mode != "r"}
    return {path for path in files if not Path(path).name.startswith("router-")}


def read(process: psutil.Process) -> set[str]:
    return {file.path for file in process.open_files() if file.mode == "r"}


def shared_memory(process: psutil.Process) -> list[str]:
    """Mappings that it writes to and that other processes could have too."""
    lines = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
    return [line for line in lines if line.split()[1][1:4:2] == "ws" and not any(own in line for own in _OWN)]
