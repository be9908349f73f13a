"""Tenants take turns, whatever each of them has queued."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from quire_router.tenant_queue import TenantQueue, TenantTurns


def test_items_of_a_tenant_that_floods_come_between_those_of_others() -> None:
    queue: TenantQueue[int] = TenantQueue()
    for item in range(4):
        queue.push("flood", item)
    queue.push("a", 10)
    queue.push("b", 20)
    queue.push("b", 21)
    queue.remove("flood", 2)
    queue.remove("flood", 99)
    queue.remove("nobody", 0)
    assert [queue.pop() for _ in range(7)] == [0, 10, 20, 1, 21, 3, None]


class Turns:
    """Tasks that hold a turn until the test ends it."""

    def __init__(self) -> None:
        self.turns = TenantTurns()
        self.order: list[str] = []
        self.ends: dict[str, asyncio.Event] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def enter(self, name: str) -> None:
        """Start a task of the tenant that the name begins with."""
        self.ends[name] = asyncio.Event()
        self.tasks[name] = asyncio.create_task(self._hold(name))
        await self.settle()

    async def end(self, name: str) -> None:
        self.ends[name].set()
        await self.settle()

    async def settle(self) -> None:
        for _ in range(5):
            await asyncio.sleep(0)

    async def _hold(self, name: str) -> None:
        async with self.turns.turn(name.split()[0]):
            self.order.append(name)
            await self.ends[name].wait()


async def test_one_task_at_a_time_has_the_turn() -> None:
    rig = Turns()
    for name in ("flood 0", "flood 1", "flood 2", "other 0"):
        await rig.enter(name)
    assert rig.order == ["flood 0"]
    for name in ("flood 0", "flood 1", "other 0", "flood 2"):
        await rig.end(name)
    assert rig.order == ["flood 0", "flood 1", "other 0", "flood 2"]
    await rig.enter("late 0")
    assert rig.order[-1] == "late 0", "a turn that nobody has is free at once"
    await rig.end("late 0")


def _cancel(rig: Turns) -> None:
    rig.tasks["b 0"].cancel()


def _cancel_with_turn(rig: Turns) -> None:
    """Cancel a task in the moment in which it gets the turn."""
    rig.ends["a 0"].set()
    loop = asyncio.get_running_loop()
    loop.call_soon(lambda: loop.call_soon(rig.tasks["b 0"].cancel))


@pytest.mark.parametrize("leave", [_cancel, _cancel_with_turn])
async def test_a_task_that_is_cancelled_keeps_no_turn(leave: Callable[[Turns], None]) -> None:
    rig = Turns()
    for name in ("a 0", "b 0", "c 0"):
        await rig.enter(name)
    leave(rig)
    await rig.settle()
    await rig.end("a 0")
    assert rig.order[-1] == "c 0" and rig.tasks["b 0"].cancelled()
    await rig.end("c 0")
