"""Several router processes share one port: all serve, dead ones are replaced, and all end together."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from tests.fakes.fake_tokenizer import FakeTokenizer
from tests.fakes.grpc_host import GrpcHost
from tests.fakes.scheduler.fake_scheduler import FakeScheduler

ROOT = Path(__file__).resolve().parents[3]
LIMIT_S = 90.0


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not condition():
            await asyncio.sleep(0.05)


def listeners(process: psutil.Process, port: int) -> set[int]:
    """Processes of the router that listen there."""
    found = set()
    for member in [process, *process.children()]:
        try:
            for connection in member.net_connections("inet"):
                if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port:
                    found.add(member.pid)
        except psutil.NoSuchProcess:
            continue
    return found


@asynccontextmanager
async def router(*flags: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, int]]:
    async with GrpcHost(FakeScheduler().add) as scheduler, GrpcHost(FakeTokenizer().add) as tokenizer:
        peers = [f"--schedulers={scheduler.address}", f"--tokenizers={tokenizer.address}"]
        command = [sys.executable, "-m", "quire_router", "--port=0", "--http-workers=3", *peers, *flags]
        environ = {name: value for name, value in os.environ.items() if not name.startswith("QUIRE_")}
        process = await asyncio.create_subprocess_exec(
            *command, cwd=ROOT, env=environ, stderr=asyncio.subprocess.PIPE, limit=1 << 20
        )
        assert process.stderr is not None
        port = 0
        async with asyncio.timeout(LIMIT_S):
            while not port:
                line = json.loads(await process.stderr.readline())
                port = int(line.get("url", ":0").rpartition(":")[2])
        draining = asyncio.ensure_future(process.stderr.read())
        try:
            yield process, port
        finally:
            if process.returncode is None:
                process.kill()
            await asyncio.gather(process.wait(), draining)


async def ask(port: int, count: int) -> list[int]:
    """Statuses of so many requests, each over a connection of its own."""

    async def one() -> int:
        async with httpx.AsyncClient(trust_env=False, timeout=LIMIT_S) as client:
            body = {"prompt": "ab", "max_tokens": 2}
            return (await client.post(f"http://127.0.0.1:{port}/v1/completions", json=body)).status_code

    return list(await asyncio.gather(*(one() for _ in range(count))))


async def test_all_processes_serve_are_replaced_when_killed_and_end_together() -> None:
    async with router() as (process, port):
        parent = psutil.Process(process.pid)
        await until(lambda: len(listeners(parent, port)) == 3)
        assert set(await ask(port, 40)) == {200}
        served = sum(bool(member.net_connections("inet")) for member in parent.children())
        assert served == 2
        victim = next(pid for pid in listeners(parent, port) if pid != process.pid)
        os.kill(victim, signal.SIGKILL)
        await until(lambda: len(listeners(parent, port) - {victim}) == 3)
        assert set(await ask(port, 40)) == {200}
        children = parent.children()
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), LIMIT_S) == 0
        assert not any(child.is_running() for child in children)


async def test_worker_processes_end_with_the_first_process() -> None:
    async with router() as (process, port):
        parent = psutil.Process(process.pid)
        await until(lambda: len(listeners(parent, port)) == 3)
        children = parent.children()
        process.kill()
        await process.wait()
        await until(lambda: not any(child.is_running() for child in children))


@pytest.mark.deep
async def test_second_router_cannot_take_the_port() -> None:
    async with router() as (_, port):
        command = [sys.executable, "-m", "quire_router", f"--port={port}", "--http-workers=2"]
        peers = ["--schedulers=127.0.0.1:1", "--tokenizers=127.0.0.1:1"]
        second = await asyncio.create_subprocess_exec(*command, *peers, cwd=ROOT, stderr=asyncio.subprocess.PIPE)
        _, errors = await asyncio.wait_for(second.communicate(), LIMIT_S)
        assert second.returncode == 2 and json.loads(errors.splitlines()[-1])["code"] == "PORT_IN_USE"


@pytest.mark.deep
@pytest.mark.parametrize("flags", [["--requests-per-minute=5"], ["--tokens-per-minute=5"]])
async def test_rate_limits_of_several_processes_need_redis(flags: list[str]) -> None:
    command = [sys.executable, "-m", "quire_router", "--port=0", "--http-workers=2", *flags]
    process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stderr=asyncio.subprocess.PIPE)
    _, errors = await asyncio.wait_for(process.communicate(), LIMIT_S)
    assert process.returncode == 2 and json.loads(errors.splitlines()[-1])["code"] == "LIMITS_NEED_REDIS"
