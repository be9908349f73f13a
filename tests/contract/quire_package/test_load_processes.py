"""Outcomes of several load processes arrive whole, however long they are and whatever else prints."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

from quire.bench.load import PlannedRequest
from quire.bench.load_processes import run_load
from quire.bench.target import Target

ROOT = Path(__file__).resolve().parents[3]
REQUESTS, EVENTS = 512, 257
EVENT = b'data: {"choices":[{"text":"a"}]}\n\n'
HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (EVENTS * len(EVENT))

NOISY = """
import os, sys
from quire.bench.load_processes import claim_stdout, say
os.set_blocking(1, False)
own = claim_stdout()
for number in range(200):
    print("noise")
    os.write(1, b"noise\\n")
    say(own, str(number) * 10_000)
sys.stdout.flush()
"""


async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """The same for every request, in two parts, so that there is a gap between."""
    try:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            length = next(line for line in head.split(b"\r\n") if line.lower().startswith(b"content-length"))
            await reader.readexactly(int(length.partition(b":")[2]))
            writer.write(HEAD + EVENT * (EVENTS // 2))
            await asyncio.sleep(0)
            writer.write(EVENT * (EVENTS - EVENTS // 2))
            await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()


async def test_long_outcomes_of_four_processes_arrive_whole() -> None:
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        target = Target(f"http://127.0.0.1:{port}", "/v1/completions", False, "fake", keep_events=True)
        plan = [PlannedRequest(i, 0.0, target.request("a", EVENTS, str(i))) for i in range(REQUESTS)]
        _, outcomes = await asyncio.to_thread(run_load, target, plan, max_concurrency=32, processes=4)
    assert [outcome.index for outcome in outcomes] == list(range(REQUESTS))
    assert all(outcome.ok for outcome in outcomes), {outcome.error for outcome in outcomes}
    for outcome in outcomes:
        assert len(outcome.gaps_s) == EVENTS - 1 and outcome.events == [EVENT.decode().strip()] * EVENTS


def test_foreign_prints_and_nonblocking_pipes_cut_no_line() -> None:
    command = [sys.executable, "-c", NOISY]
    child = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert child.returncode == 0, child.stderr[-2000:]
    assert child.stdout == "".join(f"{str(number) * 10_000}\n" for number in range(200))
    assert child.stderr.count("noise") == 400
