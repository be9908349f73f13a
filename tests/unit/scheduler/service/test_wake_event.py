"""WakeEvent wakes the waiters of each set, and no later ones."""

from __future__ import annotations

import asyncio

from quire_scheduler.service.wake_event import WakeEvent


async def test_wake_event_wakes_present_waiters_only() -> None:
    event = WakeEvent()
    event.set()
    assert event.sets == 1
    assert not await event.wait(0.01), "an earlier set woke the waiter"
    waiters = [asyncio.ensure_future(event.wait(5)) for _ in range(2)]
    await asyncio.sleep(0)
    event.set()
    assert await asyncio.gather(*waiters) == [True, True]


async def test_set_after_a_wait_that_timed_out_wakes_no_later_waiter() -> None:
    event = WakeEvent()
    assert not await event.wait(0.01)
    event.set()
    assert not await event.wait(0.01), "an earlier set woke the waiter"
    waiter = asyncio.ensure_future(event.wait(5))
    await asyncio.sleep(0)
    event.set()
    assert await waiter
