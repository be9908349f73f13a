"""A seed means one answer: alone or among others, on another stack, preempted, moved, and after a restart."""

from __future__ import annotations

import asyncio
import re
import signal
import socket
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire import AsyncClient, SamplingParams
from quire.local.spec import StackSpec
from quire.local.stack import LocalStack

LENGTHS = (3, 17, 40, 64, 90, 33)
TOKENS = 40
LIMIT_S = 120.0
# Of float32 KV: fewer pages than the requests below would like to have at once.
FEW_PAGES = 48 * 16 * 8 * 1024
Answers = list[list[tuple[int, ...]]]
# Two minutes: part of `make sampling`.
pytestmark = pytest.mark.slow


def params(number: int) -> SamplingParams:
    return SamplingParams(
        temperature=0.9,
        top_p=0.95,
        top_k=200,
        presence_penalty=0.3,
        seed=1000 + number,
        n=2,
        max_tokens=TOKENS,
        ignore_eos=True,
    )


def prompt(number: int) -> list[int]:
    return [(37 * number + 11 * place) % 4000 + 5 for place in range(LENGTHS[number])]


async def ask(client: AsyncClient, number: int) -> list[tuple[int, ...]]:
    output = await asyncio.wait_for(client.complete(prompt(number), params(number)), LIMIT_S)
    return [tuple(choice.token_ids) for choice in output.outputs]


async def alone(address: str) -> Answers:
    async with AsyncClient(address) as client:
        return [await ask(client, number) for number in range(len(LENGTHS))]


async def together(address: str, noise: int = 0) -> Answers:
    """In another order, and among others that are not looked at."""
    async with AsyncClient(address) as client:
        others = [
            asyncio.ensure_future(client.complete(prompt(i % 6)[: 3 + i], SamplingParams(max_tokens=TOKENS, seed=i)))
            for i in range(noise)
        ]
        asked = {number: asyncio.ensure_future(ask(client, number)) for number in reversed(range(len(LENGTHS)))}
        answers = [await asked[number] for number in range(len(LENGTHS))]
        await asyncio.gather(*others)
        return answers


@pytest.fixture(scope="module")
def metrics_ports() -> list[int]:
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as two:
        return [listening.getsockname()[1] for listening in (one, two)]


@pytest.fixture(scope="module")
def tight(demo_model: Path, tmp_path_factory: pytest.TempPathFactory, metrics_ports: list[int]) -> Iterator[LocalStack]:
    """Two replicas with few pages."""
    flags: dict[str, dict[str, str | bool]] = {
        "worker": {"kv-cache-memory-bytes": str(FEW_PAGES), "max-num-seqs": "12"},
        **{f"scheduler-{i + 1}": {"metrics-listen": f"127.0.0.1:{port}"} for i, port in enumerate(metrics_ports)},
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUIRE_STATE_DIR", str(tmp_path_factory.mktemp("seeds-state")))
        spec = StackSpec("seeds", str(demo_model), replicas=2, drain_timeout_s=5.0, flags=flags)
        stack = LocalStack(spec)
    yield stack
    stack.close()


def preemptions(ports: list[int]) -> float:
    total = 0.0
    for port in ports:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
            text = answer.read().decode()
        total += sum(float(value) for value in re.findall(r"^quire_scheduler_preemptions_total\S* (\S+)", text, re.M))
    return total


async def test_seed_determines_the_answer(stack: LocalStack, tight: LocalStack, metrics_ports: list[int]) -> None:
    wanted = await alone(stack.grpc)
    assert len({tokens for answer in wanted for tokens in answer}) == 2 * len(LENGTHS)
    assert all(len(tokens) == TOKENS for answer in wanted for tokens in answer)
    assert await together(stack.grpc, noise=10) == wanted
    for _ in range(5):
        assert await together(tight.grpc, noise=24) == wanted
        if preemptions(metrics_ports):
            break
    assert preemptions(metrics_ports) > 0, "nobody was preempted: the test proves nothing"
    # A worker dies under them: they move, and it comes back.
    running = asyncio.ensure_future(together(tight.grpc, noise=8))
    await asyncio.sleep(0.5)
    state = tight.directory.read()
    assert state is not None and state.services["worker-1"].process.signal(signal.SIGKILL)
    assert await running == wanted
    assert await alone(tight.grpc) == wanted
