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
from dataclasses import dataclass, field

import grpc
import pytest

from quire import AsyncClient, SamplingParams, wire
from quire.v1 import inference_pb2_grpc
from tests.chaos.answer import Ticks
from tests.chaos.rig import Rig

pytestmark = pytest.mark.slow
OTHERS = 63
# Siblings of the slow request: so much text that no buffer on the way holds it.
SIBLINGS = 16
TOKENS = 260
ROUNDS = 5
STEP_MS = 25
# Of p99 with the slow client to p99 without, in the median of the rounds; and room for the machine's own noise.
MOST_RATIO, NOISE_S = 1.3, 0.005
MOST_GROWTH_MB = 30.0
# Of what the slow one gets in pieces when it reads all along: what could not be sent is put together, not piled up.
MOST_PIECES = 0.8
SLOW = SamplingParams(temperature=0.9, seed=7, n=SIBLINGS, max_tokens=TOKENS, ignore_eos=True)
SMALL_WINDOWS = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 16384)]
Reader = Callable[[Rig, asyncio.Event], AsyncIterator[tuple[int, str]]]


async def by_grpc(rig: Rig, go_on: asyncio.Event) -> AsyncIterator[tuple[int, str]]:
    """Stops asking its stream for more after the first piece: HTTP/2's windows fill, which it keeps small.

    Logprobs make the messages so large that few of them fit.
    """
    request = wire.build_request("SLOW:", SLOW.clone(logprobs=20), request_id="slow")
    async with grpc.aio.insecure_channel(rig.stack.grpc, SMALL_WINDOWS) as channel:
        call = inference_pb2_grpc.InferenceStub(channel).Generate(request)
        async for response in call:
            delta = wire.read_response(response, "slow")
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
    # With ids, so that a token whose character is not whole yet is heard of too.
    async for _ in client.generate(f"STREAM {number}:", params, return_token_ids=True):
        ticks.tick()


@dataclass
class Round:
    """The others' p99, and what the one got: its texts, and in how many pieces."""

    p99: float = 0.0
    texts: dict[int, str] = field(default_factory=lambda: dict.fromkeys(range(SIBLINGS), ""))
    pieces: int = 0


async def one_round(rig: Rig, client: AsyncClient, read: Reader, *, stalls: bool) -> Round:
    """The one reads nothing while the others are served, or reads all along; in the end it reads the rest."""
    go_on, heard, result = asyncio.Event(), asyncio.Event(), Round()
    if not stalls:
        go_on.set()

    async def slow() -> None:
        async for index, text in read(rig, go_on):
            result.texts[index] += text
            result.pieces += 1
            heard.set()

    ticks = [Ticks() for _ in range(OTHERS)]
    one = asyncio.create_task(slow())
    await heard.wait()
    await asyncio.gather(*(other(client, number, tick) for number, tick in enumerate(ticks)))
    assert not (stalls and one.done())
    go_on.set()
    await one
    gaps = sorted(b - a for tick in ticks for a, b in zip(tick.times[10:], tick.times[11:], strict=False))
    result.p99 = gaps[int(len(gaps) * 0.99)]
    return result


@pytest.mark.parametrize("read", [by_http, by_grpc])
async def test_client_that_stops_reading_stalls_only_itself(read: Reader) -> None:
    flags = {"worker": {"max-num-seqs": str(OTHERS + SIBLINGS + 1)}}
    async with Rig(f"paced {STEP_MS}", replicas=1, tokenizers=1, flags=flags) as rig:
        ratios, growth_mb = await compare(rig, read)
        assert statistics.median(ratios) <= MOST_RATIO
        assert growth_mb <= MOST_GROWTH_MB
        rig.wait_pages_back()


async def compare(rig: Rig, read: Reader) -> tuple[list[float], float]:
    """Of each round, the others' p99 with the stalled one to that without; and what the router grew by in all."""
    ratios, began = list[float](), time.monotonic()
    async with AsyncClient(rig.stack.grpc) as client:
        wanted = await one_round(rig, client, read, stalls=False)
        resident_mb = rig.resident_mb("router")
        for number in range(ROUNDS):
            rounds = dict[bool, Round]()
            for stalls in (number % 2 == 0, number % 2 == 1):
                rounds[stalls] = await one_round(rig, client, read, stalls=stalls)
                assert rounds[stalls].texts == wanted.texts
            free, stalled = rounds[False], rounds[True]
            p99s = f"p99 {free.p99 * 1000:.1f} ms without, {stalled.p99 * 1000:.1f} ms with"
            print(f"round {number}: {p99s}; {free.pieces} and {stalled.pieces} pieces", flush=True)
            assert stalled.pieces < free.pieces * MOST_PIECES
            ratios.append((stalled.p99 - NOISE_S) / free.p99)
    growth_mb = rig.resident_mb("router") - resident_mb
    print(f"{time.monotonic() - began:.0f} s, router {growth_mb:+.1f} MB, ratios {[round(r, 2) for r in ratios]}")
    return ratios, growth_mb
