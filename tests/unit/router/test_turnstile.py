"""The turnstile: in order, a few at a time, nobody is left waiting."""

from __future__ import annotations

import asyncio

from quire_router.http.turnstile import MOST_AT_ONCE, Turnstile


async def _come_in(turnstile: Turnstile, number: int, came: list[int]) -> None:
    await turnstile.enter()
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


async def test_a_burst_comes_in_by_and_by_and_in_order() -> None:
    turnstile, came = Turnstile(), list[int]()
    tasks = [asyncio.create_task(_come_in(turnstile, number, came)) for number in range(30)]
    counts = await _per_turn(came, 30)
    assert counts[:4] == [1, 2, 4, 4] and max(counts) == MOST_AT_ONCE
    assert came == list(range(30))
    await asyncio.gather(*tasks)


async def test_who_comes_alone_does_not_wait() -> None:
    turnstile, came = Turnstile(), list[int]()
    for number in range(3):
        await _come_in(turnstile, number, came)
        assert came[-1] == number
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        turn = asyncio.create_task(_come_in(turnstile, number, came))
        await asyncio.sleep(0)
        assert turn.done()
        await asyncio.sleep(0)


async def test_who_gives_up_holds_nobody_back() -> None:
    turnstile, came = Turnstile(), list[int]()
    tasks = [asyncio.create_task(_come_in(turnstile, number, came)) for number in range(6)]
    await asyncio.sleep(0)
    for task in tasks[1:5]:
        task.cancel()
    await _per_turn(came, 2)
    assert came == [0, 5]
    assert [task.cancelled() for task in tasks] == [False, True, True, True, True, False]
