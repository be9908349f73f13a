"""Slots of which each is held by one job at a time, with a bounded number of jobs."""

from __future__ import annotations

import asyncio

import pytest

from quire_common.children.bounded_slots import BoundedSlots
from quire_common.errors import Overloaded


def _overloaded(jobs: int) -> Overloaded:
    return Overloaded("FULL", f"{jobs} jobs are under way.", "Retry.")


async def test_a_job_waits_for_a_slot_and_one_too_many_is_refused() -> None:
    slots = BoundedSlots(1, 2, _overloaded)
    order: list[str] = []
    leave = asyncio.Event()

    async def job(name: str) -> None:
        async with slots.slot():
            order.append(name)
            await leave.wait()

    tasks = [asyncio.create_task(job(name)) for name in ("first", "second")]
    await asyncio.sleep(0)
    assert order == ["first"]
    with pytest.raises(Overloaded, match="2 jobs are under way"):
        await job("third")
    leave.set()
    await asyncio.gather(*tasks)
    assert order == ["first", "second"]


async def test_jobs_that_fail_or_are_cancelled_give_their_slot_and_place_back() -> None:
    slots = BoundedSlots(1, 2, _overloaded)

    async def hold() -> None:
        async with slots.slot():
            await asyncio.Event().wait()

    holding, waiting = asyncio.create_task(hold()), asyncio.create_task(hold())
    await asyncio.sleep(0)
    for task in (waiting, holding):
        task.cancel()
    await asyncio.gather(holding, waiting, return_exceptions=True)
    for _ in range(2):  # as many as there may be jobs
        with pytest.raises(ValueError, match="broken"):
            async with slots.slot():
                raise ValueError("broken")
    async with slots.slot():
        pass
