"""Priorities, from a client's field to the order in which a crowded engine runs: over HTTP and over gRPC."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import cast

import httpx
import pytest

from quire import Client, SamplingParams
from quire.engine_options import stack_flags
from quire.local.spec import StackSpec
from quire.local.stack import LocalStack
from quire.outputs import Delta
from tests.pipeline.load_watch import LoadWatch

TOKENS, PATIENCE_S = 12, 60.0
# The slot is held by one that ends when all the others wait; so many may have been started ahead before anybody more
# urgent came. The fair policy gives order keys late: those that were looked up ahead of need are not passed any more.
PATIENT, AHEAD, HELD_TOKENS = 12, {"priority": 3, "fair": 3 + 4}, 8000
OPTIONS = {"max-num-seqs": 1, "paced": 10}


@pytest.fixture(params=["priority", "fair"])
def crowded(demo_model: Path, request: pytest.FixtureRequest) -> Iterator[LocalStack]:
    """All clients are one tenant: for these, both policies go by priority."""
    flags = stack_flags({**OPTIONS, "scheduling-policy": request.param})
    running = LocalStack(StackSpec("crowded", str(demo_model), drain_timeout_s=10.0, flags=flags))
    yield running
    running.close()


def test_high_priority_requests_start_before_waiting_ones(crowded: LocalStack, request: pytest.FixtureRequest) -> None:
    """Two waves: those of low priority fill the queue, then the urgent come."""
    ended: list[str] = []
    with (
        httpx.Client(base_url=crowded.ready.http, timeout=PATIENCE_S) as http,
        Client(crowded.grpc) as client,
        ThreadPoolExecutor(PATIENT + 4) as pool,
        LoadWatch(crowded) as watch,
    ):

        def over_http(name: str, priority: int) -> None:
            body = {"prompt": name, "max_tokens": TOKENS, "ignore_eos": True, "priority": priority}
            assert http.post("/v1/completions", json=body).status_code == 200
            ended.append(name)

        def over_grpc(name: str, priority: int) -> None:
            client.complete(name, SamplingParams(max_tokens=TOKENS, ignore_eos=True), priority=priority)
            ended.append(name)

        def begin(name: str, priority: int, count: int) -> list[Future[None]]:
            ways = (over_http, over_grpc)
            return [pool.submit(ways[number % 2], f"{name} {number}", priority) for number in range(count)]

        long = SamplingParams(max_tokens=HELD_TOKENS, ignore_eos=True)
        held = cast("Generator[Delta]", client.generate("held", long, priority=-8))
        next(held)
        waiting = begin("patient", 7, PATIENT)
        watch.wait_crowded(1 + PATIENT)
        waiting += begin("urgent", -7, 4)
        watch.wait_crowded(1 + PATIENT + 4)
        held.close()
        for future in waiting:
            future.result(PATIENCE_S)
    last_urgent = max(place for place, name in enumerate(ended) if name.startswith("urgent"))
    passed = sum(name.startswith("patient") for name in ended[last_urgent:])
    ahead = AHEAD[request.node.callspec.params["crowded"]]
    assert len(ended) == PATIENT + 4 and passed >= PATIENT - ahead, ended
