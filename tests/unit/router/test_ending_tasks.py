"""EndingTasks cancels each task once, waits for its cleanup, and forgets it."""

from __future__ import annotations

import asyncio
import gc
import weakref

import pytest

from quire_router.ending_tasks import EndingTasks

CLEANUP_TURNS = 10


async def run(events: list[str]) -> None:
    try:
        await asyncio.Event().wait()
    finally:
        for _ in range(CLEANUP_TURNS):
            await asyncio.sleep(0)
        events.append("clean")


@pytest.mark.parametrize("begun", [True, False], ids=["begun", "not begun"])
@pytest.mark.parametrize("turns", [0, 1, 5, 50])
async def test_wait_ends_after_the_cleanup_of_each_task(turns: int, begun: bool) -> None:
    ending, events = EndingTasks(), list[str]()
    task = asyncio.create_task(run(events))
    if begun:
        await asyncio.sleep(0)
    ending.drop(task)
    for _ in range(turns):
        await asyncio.sleep(0)
    await ending.wait()
    assert events == ["clean"] and task.cancelled()


async def test_task_that_has_ended_is_forgotten() -> None:
    ending = EndingTasks()
    task = asyncio.create_task(run([]))
    ended = weakref.ref(task)
    ending.drop(task)
    del task
    for _ in range(2 * CLEANUP_TURNS):
        await asyncio.sleep(0)
    gc.collect()
    assert ended() is None


async def test_error_of_a_dropped_task_is_not_raised() -> None:
    async def fail() -> None:
        raise ValueError

    ending = EndingTasks()
    ending.drop(asyncio.create_task(fail()))
    await ending.wait()
