"""A session's messages to a router that falls behind: rows join, and nothing is lost or told out of order."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from quire.v1 import scheduler_pb2
from quire_common.columns import i32
from quire_common.credit.hello import PROTOCOL_VERSION, Epoch, PageGeometry
from quire_common.errors import Overloaded, QuireError
from quire_common.sequence import sequence_to_pb
from quire_common.ticket import Ticket
from quire_scheduler.config import SchedulerConfig
from quire_scheduler.core.outputs import AdmittedNote, FinishedNote, SessionOutputs
from quire_scheduler.service.output_split import PIECE_BYTES
from quire_scheduler.service.session import MOST_JOINED_BYTES, Session
from tests.fakes.scheduler.scheduler_rig import a_sequence
from tests.unit.scheduler.service.test_output_split import scored
from tests.unit.scheduler.service.test_row_join import FINISHED, outputs


class Reader:
    """A session of an engine that only knows it, read by a router that takes its time. `leaves`: it wants nothing more
    after its hello, and what runs may finish."""

    def __init__(self, *, leaves: bool = False, **options: Any) -> None:
        self.runs = True
        engine: Any = SimpleNamespace(
            config=SchedulerConfig(**options),
            core=None,
            open_session=lambda _: 1,
            close_session=lambda _: None,
            running=lambda _: self.runs,
            keep_transfers=lambda *_: None,
        )
        self.session = Session(engine)
        self.stream: Any = self.session.run(_hello(leaves))

    async def read(self) -> scheduler_pb2.SessionResponse:
        async with asyncio.timeout(5):
            message: scheduler_pb2.SessionResponse = await anext(self.stream)
            return message


async def _hello(leaves: bool) -> AsyncIterator[scheduler_pb2.SessionRequest]:
    yield scheduler_pb2.SessionRequest(hello=scheduler_pb2.SessionHello(protocol_version=PROTOCOL_VERSION))
    if not leaves:
        await asyncio.Event().wait()


def step(number: int, *notes: FinishedNote) -> SessionOutputs:
    """Of requests 3 and 4."""
    out = outputs([(3, [number], 0), (4, [number + 100], 0)])
    out.finished.extend(notes)
    return out


def columns(message: scheduler_pb2.SessionResponse) -> list[list[int]]:
    return [i32(column, "column").tolist() for column in (message.handle, message.count, message.token)]


async def test_rows_behind_unsent_rows_are_joined() -> None:
    reader = Reader()
    assert (await reader.read()).HasField("welcome")
    for number in range(5):
        assert reader.session.deliver(step(number))
    assert columns(await reader.read()) == [[3, 4], [5, 5], [0, 1, 2, 3, 4, 100, 101, 102, 103, 104]]
    assert reader.session.deliver(step(5))
    assert columns(await reader.read()) == [[3, 4], [1, 1], [5, 105]], "who keeps up gets each step by itself"
    assert reader.session._bytes == 0
    await reader.stream.aclose()


async def test_notes_behind_unsent_notes_are_joined() -> None:
    reader = Reader()
    await reader.read()
    for out in (step(0), step(1), step(2, FINISHED), step(3)):
        assert reader.session.deliver(out)
    message = await reader.read()
    assert columns(message) == [[3, 4], [4, 4], [0, 1, 2, 3, 100, 101, 102, 103]]
    assert [note.handle for note in message.finished] == [3] and reader.session._bytes == 0
    await reader.stream.aclose()


async def test_joined_tickets_stay_below_the_message_bound() -> None:
    """A long queue of admissions with tickets of 262,144 tokens each became one message of 107 MiB."""
    reader = Reader(session_queue_bytes=256 << 20)
    await reader.read()
    hashes = tuple(bytes([n]) * 32 for n in range(256)) * 64
    ticket = Ticket(b"t" * 16, "prefill", Epoch(1, 1), hashes, b"", 0, b"k" * 32, (), PageGeometry(16, (), b"n" * 32))
    for handle in range(5, 205):
        out = step(handle)
        out.admitted.append(AdmittedNote(handle, 0, 0, ticket))
        assert reader.session.deliver(out)
    admitted = list[int]()
    while len(admitted) < 200:
        message = await reader.read()
        assert message.ByteSize() <= MOST_JOINED_BYTES
        admitted += [note.handle for note in message.admitted]
    assert admitted == list(range(5, 205))
    await reader.stream.aclose()


async def test_unjoinable_message_waits_behind() -> None:
    reader = Reader()
    await reader.read()
    admitted = step(1)
    admitted.admitted.append(AdmittedNote(4, 0, 0))  # 4 is another request now
    for out in (step(0), admitted, step(2)):
        assert reader.session.deliver(out)
    first, second = await reader.read(), await reader.read()
    assert columns(first) == [[3, 4], [1, 1], [0, 100]] and not first.admitted
    assert columns(second) == [[3, 4], [2, 2], [1, 2, 101, 102]] and second.admitted[0].handle == 4
    await reader.stream.aclose()


async def test_half_closed_session_ends_after_all_outputs() -> None:
    reader = Reader(leaves=True)
    await reader.read()
    await asyncio.sleep(0)
    reader.runs = False
    for out in (step(0), step(1, FINISHED)):  # nothing runs any more when the first of both is delivered
        assert reader.session.deliver(out)
    message = await reader.read()
    assert columns(message)[2] == [0, 1, 100, 101] and len(message.finished) == 1
    with pytest.raises(StopAsyncIteration):
        await reader.read()


async def test_failed_session_takes_no_more_outputs() -> None:
    reader = Reader(session_queue_bytes=1 << 16)
    await reader.read()
    taken, wide = 0, outputs([(handle, [1] * 8, 0) for handle in range(512)])
    while reader.session.deliver(wide):
        taken += 1
        assert reader.session._bytes <= 1 << 16 and taken < 100
    assert taken == 3, "16 KiB of tokens each, and one row for each request"
    assert not reader.session.deliver(step(0)) and reader.session._bytes == 0
    with pytest.raises(Overloaded, match="SESSION_TOO_SLOW"):
        await reader.read()


async def test_failed_session_takes_no_more_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, told, submits = Reader(session_queue=1), asyncio.Event(), list[object]()
    monkeypatch.setattr(reader.session._engine, "submit", lambda *what: submits.append(what), raising=False)

    async def messages() -> AsyncIterator[scheduler_pb2.SessionRequest]:
        async for hello in _hello(leaves=True):
            yield hello
        await told.wait()
        for handle in range(3):
            message = scheduler_pb2.SessionRequest()
            message.submit.add(handle=handle, sequence=sequence_to_pb(a_sequence([5, 6])))
            yield message

    stream: Any = reader.session.run(messages())
    assert (await anext(stream)).HasField("welcome")
    while reader.session._put(scheduler_pb2.SessionResponse()):
        await asyncio.sleep(0)
    told.set()
    for _ in range(20):
        await asyncio.sleep(0)
    assert not submits, "they would run for a router that hears nothing of them"
    with pytest.raises(Overloaded, match="SESSION_TOO_SLOW"):
        await anext(stream)


def scored_step(handle: int, entries: int) -> SessionOutputs:
    """With logprobs of `entries` tokens of a prompt: about 16 bytes each, and 8 for each of 20 alternatives."""
    out = step(0)
    out.prompt_logprobs.append(scored(handle, 1, entries, 20))
    return out


async def test_large_step_enters_an_empty_queue_in_pieces() -> None:
    """64 MiB is what gRPC carries."""
    reader = Reader(session_queue_bytes=1 << 20)
    await reader.read()
    assert reader.session.deliver(scored_step(3, 40_000))
    entries = 0
    while reader.session._waiting:
        message = await reader.read()
        assert message.ByteSize() < 1.1 * PIECE_BYTES
        entries += sum(i32(message.prompt_logprobs.count).tolist())
    assert entries == 40_000
    assert reader.session.deliver(step(1)), "the session goes on"
    await reader.stream.aclose()


@pytest.mark.parametrize("has_ended", [False, True])
async def test_prompt_logprobs_that_fill_the_queue_end_their_request_alone(
    has_ended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`has_ended`: the step is the request's last, so that the engine knows it no more."""
    reader, failed = Reader(session_queue_bytes=1 << 20), list[tuple[int, str]]()

    def fail(_session: int, handle: int, error: QuireError) -> bool:
        failed.append((handle, error.code))
        return not has_ended

    monkeypatch.setattr(reader.session._engine, "fail", fail, raising=False)
    await reader.read()
    assert reader.session.deliver(scored_step(3, 4_000))
    last = scored_step(3, 4_000)
    last.finished.append(FINISHED)
    assert reader.session.deliver(last), "the session was ended for what one request asks"
    assert failed == [(3, "PROMPT_LOGPROBS_TOO_LARGE")]
    told = [await reader.read() for _ in range(len(reader.session._waiting))]
    ends = [(note.handle, note.error.code) for message in told for note in message.failed]
    assert ends == ([(3, "PROMPT_LOGPROBS_TOO_LARGE")] if has_ended else [])
    assert sum(len(message.finished) for message in told) == (0 if has_ended else 1)
    tokens = [token for message in told for token in columns(message)[2]]
    assert tokens.count(100) == 2, "the other request's rows come"
    assert reader.session._bytes == 0
    await reader.stream.aclose()
