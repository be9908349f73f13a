"""A message of costly submits is taken in turns, between which the scheduler's other work goes on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

from quire.v1 import scheduler_pb2
from quire_common.columns import pack_i32
from quire_common.credit.hello import PROTOCOL_VERSION
from quire_common.errors import Overloaded
from quire_common.sequence import sequence_to_pb
from quire_scheduler.config import SchedulerConfig
from quire_scheduler.service.session import Session
from tests.fakes.scheduler.scheduler_rig import a_sequence

SUBMITS, SUBMIT_S = 64, 0.003


class Engine:
    """Takes its time for each submit, and remembers what was asked in which turn of the loop."""

    def __init__(self) -> None:
        self.config = SchedulerConfig()
        self.core = None
        self.turn = 0
        self.asked: list[tuple[int, str]] = []
        self.done = asyncio.Event()

    def open_session(self, _sink: Any) -> int:
        return 1

    def close_session(self, _number: int) -> None:
        self.asked.append((self.turn, "close"))

    def submit(self, *_: Any) -> None:
        time.sleep(SUBMIT_S)
        self.asked.append((self.turn, "submit"))

    def abort(self, *_: Any) -> None:
        self.asked.append((self.turn, "abort"))

    def keep_transfers(self, *_: Any) -> None:
        if self.asked:
            self.done.set()

    def running(self, _number: int) -> bool:
        return True


async def messages() -> AsyncIterator[scheduler_pb2.SessionRequest]:
    yield scheduler_pb2.SessionRequest(hello=scheduler_pb2.SessionHello(protocol_version=PROTOCOL_VERSION))
    costly = scheduler_pb2.SessionRequest(abort=pack_i32([1]))
    for handle in range(SUBMITS):
        costly.submit.add(handle=handle, sequence=sequence_to_pb(a_sequence([5, 6])))
    yield costly
    await asyncio.Event().wait()


async def counted(engine: Engine) -> None:
    while True:
        engine.turn += 1
        await asyncio.sleep(0)


async def begun() -> tuple[Engine, Session, Any, asyncio.Task[None]]:
    engine = Engine()
    given: Any = engine
    session = Session(given)
    stream: Any = session.run(messages())
    await anext(stream)
    return engine, session, stream, asyncio.create_task(counted(engine))


async def test_many_submits_yield_to_the_event_loop_in_order() -> None:
    engine, _, stream, ticker = await begun()
    async with asyncio.timeout(10):
        await engine.done.wait()
    turns = [turn for turn, what in engine.asked if what == "submit"]
    assert len(turns) == SUBMITS
    assert max(turns.count(turn) for turn in set(turns)) <= 4, "more than 10 ms at a stretch"
    assert [what for _turn, what in engine.asked] == ["submit"] * SUBMITS + ["abort"]
    ticker.cancel()
    await stream.aclose()


async def test_session_that_fails_between_turns_drops_the_rest_of_the_message() -> None:
    engine, session, stream, ticker = await begun()
    async with asyncio.timeout(10):
        while not engine.asked:
            await asyncio.sleep(0)
    session._end(Overloaded("SESSION_TOO_SLOW", "Too slow.", "Read faster."))
    for _ in range(100):
        await asyncio.sleep(0)
    ticker.cancel()
    assert len(engine.asked) < SUBMITS and engine.asked[-1][1] == "submit"
    await stream.aclose()


async def test_ended_session_submits_nothing_more() -> None:
    engine, _, stream, ticker = await begun()
    async with asyncio.timeout(10):
        while not engine.asked:
            await asyncio.sleep(0)
    await stream.aclose()
    for _ in range(100):
        await asyncio.sleep(0)
    ticker.cancel()
    assert engine.asked[-1][1] == "close"
    assert len(engine.asked) < SUBMITS
