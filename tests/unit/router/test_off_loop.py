"""LongWork: pieces of work beside the event loop."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref

import pytest

from quire_router.off_loop import LongWork, off_loop


async def test_result_and_exception_reach_the_caller() -> None:
    work = LongWork()
    assert await work.run(lambda: threading.current_thread().name, "a") == "long-work_0"
    with pytest.raises(ZeroDivisionError):
        await work.run(lambda: 1 // 0, "a")
    for heavy in (False, True):
        here = await off_loop(lambda: threading.current_thread() is threading.main_thread(), heavy=heavy, tenant="a")
        assert here != heavy


async def test_tenants_have_turns() -> None:
    work, order, begin = LongWork(), list[str](), threading.Event()
    first = asyncio.create_task(work.run(begin.wait, "flood"))
    await asyncio.sleep(0)
    pieces = [work.run(lambda name=f"flood {n}": order.append(name), "flood") for n in range(3)]  # type: ignore[misc]  # mypy does not infer a lambda with a default
    pieces += [work.run(lambda name=f"other {n}": order.append(name), "other") for n in range(2)]  # type: ignore[misc]  # as above
    waiting = [asyncio.create_task(piece) for piece in pieces]
    await asyncio.sleep(0)
    begin.set()
    await asyncio.gather(first, *waiting)
    assert order == ["flood 0", "other 0", "flood 1", "other 1", "flood 2"]


async def test_thread_works_half_of_the_time() -> None:
    work, pieces = LongWork(), 3

    def spin() -> float:
        began_s = time.thread_time()
        while time.thread_time() - began_s < 0.03:
            pass
        return time.thread_time() - began_s

    began_s = time.monotonic()
    worked_s = await asyncio.gather(*(work.run(spin, "a") for _ in range(pieces)))
    pauses_s = sum(worked_s) * (pieces - 1) / pieces
    assert time.monotonic() - began_s >= 0.95 * (sum(worked_s) + pauses_s)


class Body:
    """An object that a piece of work keeps alive."""


async def test_a_piece_whose_caller_left_before_its_turn_is_dropped_at_once() -> None:
    work, ran, begin, body = LongWork(), list[str](), threading.Event(), Body()
    held = weakref.ref(body)
    first = asyncio.create_task(work.run(begin.wait, "a"))
    left = asyncio.create_task(work.run(lambda body=body: ran.append("left"), "a"))  # type: ignore[misc]  # mypy does not infer a lambda with a default
    stays = asyncio.create_task(work.run(lambda: ran.append("stays"), "a"))
    del body
    await asyncio.sleep(0)
    left.cancel()
    await asyncio.wait([left])
    del left
    gc.collect()  # a traceback and its frames are a cycle
    dropped = held() is None
    begin.set()
    await asyncio.gather(first, stays)
    assert dropped and ran == ["stays"]
