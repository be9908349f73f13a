"""A service announces itself in Redis when it is ready, and withdraws first thing when it stops."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from pathlib import Path

from quire_common.discovery import make_discovery
from tests.redis_server import RedisServer, redis_server

__all__ = ["redis_server"]  # a fixture, used by its name

MODEL = Path(__file__).resolve().parents[3] / "models" / "demo"
LIMIT_S = 60.0


async def test_tokenizer_announces_itself_and_leaves(redis_server: RedisServer) -> None:
    spec = f"{redis_server.url}?ttl_s=30&poll_s=0.1"
    command = [sys.executable, "-m", "quire_tokenizer", "--model", str(MODEL), "--discovery", spec]
    discovery = make_discovery(spec, {})
    process = await asyncio.create_subprocess_exec(*command, stderr=subprocess.DEVNULL)
    try:
        watch = discovery.watch("tokenizer")
        seen = [await asyncio.wait_for(anext(watch), LIMIT_S)]
        if not seen[-1]:
            seen.append(await asyncio.wait_for(anext(watch), LIMIT_S))
        (endpoint,) = seen[-1]
        assert endpoint.instance == f"tokenizer-{endpoint.address}"
        assert endpoint.address.startswith("127.0.0.1:")
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(anext(watch), LIMIT_S) == []  # long before its time to live
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        await discovery.close()


def test_an_address_that_nobody_can_dial_is_refused(redis_server: RedisServer) -> None:
    command = [sys.executable, "-m", "quire_tokenizer", "--model", str(MODEL), "--discovery", redis_server.url]
    done = subprocess.run(
        [*command, "--insecure", "--listen", "0.0.0.0:0"], capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 2
    assert "ADVERTISE_MISSING" in done.stderr.splitlines()[-1]
