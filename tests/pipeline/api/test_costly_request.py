"""One valid request of 35 KB, 64 stop strings of 512 random characters and n = 128, harms nobody but itself.

It once stopped 8 other clients' streams for 182 s and took a tokenizer from 75 to 954 MiB. What bounds it is tried here
twice: the router refuses the product, and tokenizers that get it all the same, from elsewhere, go on.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest

from quire.local.spec import StackSpec
from quire.local.stack import LocalStack
from quire.v1 import tokenizer_pb2 as tb
from quire.v1 import tokenizer_pb2_grpc
from quire_common.columns import pack_i32
from tests.pipeline.mutual_tls import dial_aio
from tests.pipeline.page_tiers import PATIENT

FLAGS = {"worker": {"paced": "10", "max-num-seqs": "256"}, **PATIENT}
LETTERS = "abcdefghijklmnopqrstuvwxyz "
OTHERS, TOKENS = 8, 700
MOST_GROWTH_BYTES = 128 << 20


@pytest.fixture(scope="module")
def paced(tmp_path_factory: pytest.TempPathFactory, demo_model: Path) -> Iterator[LocalStack]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUIRE_STATE_DIR", str(tmp_path_factory.mktemp("costly")))
        running = LocalStack(StackSpec("costly", str(demo_model), tokenizers=2, flags=FLAGS, drain_timeout_s=5.0))
    yield running
    assert running.deaths == []
    running.close()


def stop_list(chars: int) -> list[str]:
    drawn = random.Random(7)
    return ["".join(drawn.choices(LETTERS, k=chars)) for _ in range(64)]


def tokenizers_of(stack: LocalStack) -> list[tuple[int, int]]:
    """(pid, port) of each."""
    state = stack.directory.read()
    assert state is not None
    return [(service.pid, service.port) for name, service in state.services.items() if name.startswith("tokenizer")]


def resident_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) * 1024


async def longest_gap(client: httpx.AsyncClient) -> float:
    """Between two events of a stream."""
    body = {"prompt": "ROMEO:", "max_tokens": TOKENS, "ignore_eos": True, "stream": True, "temperature": 0}
    longest, last_s, events = 0.0, 0.0, 0
    async with client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                now_s = time.monotonic()
                longest, last_s, events = max(longest, now_s - (last_s or now_s)), now_s, events + 1
    assert events > 1
    return longest


async def beside(stack: LocalStack, costly: AsyncIterator[None] | None) -> tuple[float, int]:
    """(the longest gap of the other clients, the most that a tokenizer grew)."""
    before = {pid: resident_bytes(pid) for pid, _ in tokenizers_of(stack)}
    async with httpx.AsyncClient(base_url=stack.ready.http, timeout=120) as client:
        others = [asyncio.create_task(longest_gap(client)) for _ in range(OTHERS)]
        await asyncio.sleep(1)
        grown = 0
        if costly is not None:
            async for _ in costly:
                grown = max(grown, *(resident_bytes(pid) - size for pid, size in before.items()))
        gaps = await asyncio.gather(*others)
    return max(gaps), max(grown, *(resident_bytes(pid) - size for pid, size in before.items()))


async def over_http(stack: LocalStack, stops: list[str], wanted: int) -> AsyncIterator[None]:
    body = {"prompt": "JULIET:", "n": 128, "max_tokens": 60, "ignore_eos": True, "stop": stops}
    async with httpx.AsyncClient(base_url=stack.ready.http, timeout=120) as client:
        answer = await client.post("/v1/completions", json=body)
        assert answer.status_code == wanted, answer.text
        yield


async def past_the_router(stack: LocalStack, stops: list[str]) -> AsyncIterator[None]:
    """All of it to each tokenizer, with 60 rows for each sequence."""
    handles, prompt = range(0, 256, 2), [5, 80, 300, 7]
    for _, port in tokenizers_of(stack):
        async with dial_aio(stack, "tokenizer", port) as channel:
            call = tokenizer_pb2_grpc.TokenizerStub(channel).Detokenize()
            for handle in handles:
                await call.write(tb.DetokenizeRequest(open=[tb.DetokenizeOpen(handle=handle, stop=stops)]))
                assert not (await call.read()).errors
            for step in range(60):
                rows = tb.DetokenizeRequest(
                    handle=pack_i32(list(handles)),
                    count=pack_i32([1] * 128),
                    token=pack_i32([prompt[step % 4] + handle for handle in handles]),
                    finish=bytes(128),
                )
                await call.write(rows)
                assert len((await call.read()).text) == 128
            yield
            call.cancel()


@pytest.mark.deep
async def test_costly_stop_strings_do_not_delay_other_streams(paced: LocalStack) -> None:
    alone, _ = await beside(paced, None)
    figures = {"alone": (alone, 0)}
    for name, costly in (
        ("refused", over_http(paced, stop_list(512), 400)),
        ("largest allowed", over_http(paced, stop_list(128), 200)),
        ("past the router", past_the_router(paced, stop_list(512))),
    ):
        figures[name] = gap, grown = await beside(paced, costly)
        assert grown < MOST_GROWTH_BYTES, figures
        assert gap < 4 * alone + 1.0, figures
    print(json.dumps({name: {"gap_s": gap, "grown_mib": grown / 2**20} for name, (gap, grown) in figures.items()}))
