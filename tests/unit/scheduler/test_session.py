"""A session's messages to a router that falls behind: rows join, and nothing is lost or told out of order."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

from quire.v1 import scheduler_pb2
from quire_common.columns import i32
from quire_common.credit.hello import PROTOCOL_VERSION
from quire_scheduler.config import SchedulerConfig
from quire_scheduler.outputs import FinishedNote, SessionOutputs
from quire_scheduler.session import Session
from tests.unit.scheduler.test_outputs import outputs


class Reader:
    """A session of an engine that only knows it, read by a router that takes its time."""

    def __init__(self, **options: Any) -> None:
        engine: Any = SimpleNamespace(
            config=SchedulerConfig(**options),
            core=None,
            open_session=lambda _: 1,
            close_session=lambda _: None,
            running=lambda _: True,
        )
        self.session = Session(engine)
        self.stream: Any = self.session.run(_hello())

    async def read(self) -> scheduler_pb2.SessionResponse:
        async with asyncio.timeout(5):
            message: scheduler_pb2.SessionResponse = await anext(self.stream)
            return message


async def _hello() -> AsyncIterator[scheduler_pb2.SessionRequest]:
    yield scheduler_pb2.SessionRequest(hello=scheduler_pb2.SessionHello(protocol_version=PROTOCOL_VERSION))
    await asyncio.Event().wait()


def step(number: int, *notes: FinishedNote) -> SessionOutputs:
    """Of requests 3 and 4."""
    out = outputs([(3, [number], 0), (4, [number + 100], 0)])
    out.finished.extend(notes)
    return out


def columns(message: scheduler_pb2.SessionResponse) -> list[list[int]]:
    return [i32(column, "column").tolist() for column in (message.handle, message.count, message.token)]


async def test_rows_that_wait_behind_rows_join_them() -> None:
    reader = Reader()
    assert (await reader.read()).HasField("welcome")
    for number in range(5):
        assert reader.session.deliver(step(number))
    assert columns(await reader.read()) == [[3, 4], [5, 5], [0, 1, 2, 3, 4, 100, 101, 102, 103, 104]]
    assert reader.session.deliver(step(5))
    assert columns(await reader.read()) == [[3, 4], [1, 1], [5, 105]], "who keeps up gets each step by itself"
    assert reader.session._bytes == 0
    await reader.stream.aclose()


async def test_notes_keep_their_place() -> None:
    reader = Reader()
    await reader.read()
    for out in (step(0), step(1), step(2, FinishedNote(9, 1, 1, 0, -1, [])), step(3)):
        assert reader.session.deliver(out)
    first, second = await reader.read(), await reader.read()
    assert columns(first) == [[3, 4], [2, 2], [0, 1, 100, 101]] and not first.finished
    assert columns(second) == [[3, 4], [2, 2], [2, 3, 102, 103]] and second.finished[0].handle == 9
    await reader.stream.aclose()


async def test_bytes_that_wait_are_bounded_all_the_same() -> None:
    reader = Reader(session_queue_bytes=1 << 16)
    await reader.read()
    taken = 0
    while reader.session.deliver(step(taken)):
        taken += 1
        assert reader.session._bytes <= 1 << 16 and taken < 100_000
    assert taken > 7000, "eight bytes of tokens a step: as many as there is room for"
    await reader.stream.aclose()
