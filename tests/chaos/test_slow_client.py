"""One client of 64 stops reading: its own stream stalls, nobody else's does, memory stays bounded, nothing is lost.

Rounds with and without it alternate in one run; what is compared is what the other 63 wait between two tokens.
"""

from __future__ import annotations

import asyncio
import json
import socket
import statistics
import time
from collections.abc import AsyncIterator, Callable

import pytest

from quire import AsyncClient, SamplingParams
from tests.chaos.load import Ticks
from tests.chaos.rig import Rig

pytestmark = pytest.mark.slow
OTHERS = 63
# Siblings of the slow request: so much text that no buffer on the way holds it.
SIBLINGS = 16
TOKENS = 260
ROUNDS = 4
STEP_MS = 25
# Of p99 with the slow client to p99 without, in the median of the rounds; and room for the machine's own noise.
MOST_RATIO, NOISE_S = 1.3, 0.005
MOST_GROWTH_MB = 30.0
SLOW = SamplingParams(temperature=0.9, seed=7, n=SIBLINGS, max_tokens=TOKENS, ignore_eos=True)
Texts = dict[int, str]
Reader = Callable[[Rig, asyncio.Event], AsyncIterator[tuple[int, str]]]


async def by_grpc(rig: Rig, go_on: asyncio.Event) -> AsyncIterator[tuple[int, str]]:
    """Stops asking its stream for more after the first piece: HTTP/2's windows fill."""
    async with AsyncClient(rig.stack.grpc) as client:
        async for delta in client.generate("SLOW:", SLOW):
            yield delta.index, delta.text
            await go_on.wait()


async def by_http(rig: Rig, go_on: asyncio.Event) -> AsyncIterator[tuple[int, str]]:
    """Stops reading its socket, whose buffer is small, after the first piece."""
    body = {"prompt": "SLOW:", "n": SIBLINGS, "max_tokens": TOKENS, "ignore_eos": True, "stream": True}
    content = json.dumps({**body, "temperature": 0.9, "seed": 7}).encode()
    host, port = rig.stack.ready.http.removeprefix("http://").split(":")
    raw = socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    raw.setblocking(False)
    await asyncio.get_running_loop().sock_connect(raw, (host, int(port)))
    reader, writer = await asyncio.open_connection(sock=raw, limit=4096)
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}"
    )
    writer.write(head.encode() + b"\r\n\r\n" + content)
    try:
        async for line in reader:
            if line.startswith(b"data: [DONE]"):
                return
            if line.startswith(b"data: "):
                for choice in json.loads(line[6:])["choices"]:
                    yield choice["index"], choice["text"]
                await go_on.wait()
    finally:
        writer.close()


async def other(client: AsyncClient, number: int, ticks: Ticks) -> None:
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    async for _ in client.generate(f"STREAM {number}:", params):
        ticks.tick()


async def one_round(rig: Rig, client: AsyncClient, read: Reader, *, stalls: bool) -> tuple[float, Texts]:
    """The others' p99 while the one stalls (or does not), and all that the one got in the end."""
    go_on, texts = asyncio.Event(), dict.fromkeys(range(SIBLINGS), "")
    if not stalls:
        go_on.set()
    heard = asyncio.Event()

    async def slow() -> None:
        async for index, text in read(rig, go_on):
            texts[index] += text
            heard.set()

    ticks = [Ticks() for _ in range(OTHERS)]
    one = asyncio.create_task(slow())
    await heard.wait()
    await asyncio.gather(*(other(client, number, tick) for number, tick in enumerate(ticks)))
    assert not (stalls and one.done())
    go_on.set()
    await one
    gaps = sorted(b - a for tick in ticks for a, b in zip(tick.times[10:], tick.times[11:], strict=False))
    return gaps[int(len(gaps) * 0.99)], texts


@pytest.mark.parametrize("read", [by_http, by_grpc])
async def test_a_client_that_stops_reading_stalls_itself_alone(read: Reader) -> None:
    flags = {"worker": {"max-num-seqs": str(OTHERS + SIBLINGS + 1)}}
    async with Rig(f"paced {STEP_MS}", replicas=1, tokenizers=1, flags=flags) as rig:
        async with AsyncClient(rig.stack.grpc) as client:
            _, wanted = await one_round(rig, client, read, stalls=False)
            resident_mb = rig.resident_mb("router")
            ratios, began = list[float](), time.monotonic()
            for number in range(ROUNDS):
                p99 = dict[bool, float]()
                for stalls in (number % 2 == 0, number % 2 == 1):
                    p99[stalls], texts = await one_round(rig, client, read, stalls=stalls)
                    assert texts == wanted
                ratios.append((p99[True] - NOISE_S) / p99[False])
                print(
                    f"round {number}: p99 {p99[False] * 1000:.1f} ms without, {p99[True] * 1000:.1f} ms with",
                    flush=True,
                )
            growth_mb = rig.resident_mb("router") - resident_mb
            print(f"{time.monotonic() - began:.0f} s, router {growth_mb:+.1f} MB, ratios {ratios}")
        assert statistics.median(ratios) <= MOST_RATIO
        assert growth_mb <= MOST_GROWTH_MB
        rig.wait_pages_back()
