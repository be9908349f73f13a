"""The request pacer admits requests in order, a few at a time. Probes bypass the pacer."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from quire_router.api_keys import ApiKeys
from quire_router.front.http.edge import Edge
from quire_router.front.http.exchange import send_json
from quire_router.front.http.request_pacer import MOST_AT_ONCE, RequestPacer
from quire_router.limits.rate_limits import RateLimits

if TYPE_CHECKING:
    from starlette.types import Message, Receive, Scope, Send


async def _come_in(pacer: RequestPacer, number: int, came: list[int]) -> None:
    await pacer.enter()
    came.append(number)


async def _per_turn(came: list[int], wanted: int) -> list[int]:
    """How many came in each turn of the loop in which any did."""
    counts, before = list[int](), 0
    while len(came) < wanted:
        await asyncio.sleep(0)
        if len(came) > before:
            counts.append(len(came) - before)
        before = len(came)
    return counts


async def test_burst_is_admitted_gradually_and_in_order() -> None:
    pacer, came = RequestPacer(), list[int]()
    tasks = [asyncio.create_task(_come_in(pacer, number, came)) for number in range(30)]
    counts = await _per_turn(came, 30)
    assert counts[:4] == [1, 2, 4, 4] and max(counts) == MOST_AT_ONCE
    assert came == list(range(30))
    await asyncio.gather(*tasks)


async def test_single_request_does_not_wait() -> None:
    pacer, came = RequestPacer(), list[int]()
    for number in range(3):
        await _come_in(pacer, number, came)
        assert came[-1] == number
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        turn = asyncio.create_task(_come_in(pacer, number, came))
        await asyncio.sleep(0)
        assert turn.done()
        await asyncio.sleep(0)


async def test_cancelled_request_does_not_delay_others() -> None:
    pacer, came = RequestPacer(), list[int]()
    tasks = [asyncio.create_task(_come_in(pacer, number, came)) for number in range(6)]
    await asyncio.sleep(0)
    for task in tasks[1:5]:
        task.cancel()
    await _per_turn(came, 2)
    assert came == [0, 5]
    assert [task.cancelled() for task in tasks] == [False, True, True, True, True, False]


async def test_probe_is_answered_during_a_burst() -> None:
    answered = list[str]()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        answered.append(scope["path"])
        await send_json(send, b"{}")

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        assert message["type"].startswith("http.response.")

    edge = Edge(app, ApiKeys([]), RateLimits(), max_body_bytes=1000)
    paths = [*["/v1/completions"] * 20, "/livez"]
    scopes = [{"type": "http", "method": "GET", "path": path, "headers": []} for path in paths]
    await asyncio.gather(*(edge(scope, receive, send) for scope in scopes))
    assert sorted(answered) == sorted(paths) and answered[1] == "/livez"
