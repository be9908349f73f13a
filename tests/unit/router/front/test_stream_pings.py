"""While deltas are awaited, pings are sent, and no delta is lost."""

from __future__ import annotations

import pytest

from quire_router.front.http import stream_writer
from tests.unit.router.makers import make_generation, make_job


@pytest.mark.parametrize("logprobs", [-1, 0], ids=["without logprobs", "with logprobs"])
async def test_pings_lose_no_delta(logprobs: int) -> None:
    generation = make_generation(make_job(logprobs=logprobs))
    assert generation.listens == (logprobs < 0)
    pings = 0

    async def ping() -> None:
        """The first text comes during the third ping."""
        nonlocal pings
        pings += 1
        if pings == 3:
            generation.sequences[0].add_text("a", -1, 1)

    (delta,) = await stream_writer._next_deltas(generation, ping, 0.01)
    assert delta.text == "a" and pings == 3


async def test_ping_s_0_sends_no_ping() -> None:
    generation = make_generation(make_job())
    generation.sequences[0].add_text("a", -1, 1)

    async def ping() -> None:
        raise AssertionError("no ping was asked for")

    (delta,) = await stream_writer._next_deltas(generation, ping, 0.0)
    assert delta.text == "a"
