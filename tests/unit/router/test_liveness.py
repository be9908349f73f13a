"""The router handles silent peers, lost engines, and peers that do not read steps or submits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from quire.v1 import scheduler_pb2 as sb
from quire.v1 import tokenizer_pb2 as tb
from quire_common.columns import i32, pack_i32
from quire_common.credit.hello import Epoch, PageGeometry
from quire_common.errors import FailedPrecondition, Internal, InvalidArgument, Overloaded, QuireError, Unavailable
from quire_common.logit_controls import LogitControls
from quire_common.sequence import Sampling, Sequence, Stop
from quire_common.ticket import Ticket
from quire_router.config import RouterConfig
from quire_router.replicas.session_outgoing import SessionOutgoing
from quire_router.sequences.delta import LENGTH
from quire_router.sequences.delta_queue import DeltaQueue
from quire_router.sequences.engine_failure import failure_of
from quire_router.sequences.logprob_entries import pack_entry
from quire_router.sequences.sequence_state import SequenceState
from quire_router.text.detokenize_stream import DetokenizeStream
from quire_router.text.stream_outgoing import MAX_STEPS
from quire_router.watchdog import Watchdog
from tests.fakes.fake_tokenizer import FakeTokenizer
from tests.unit.router.makers import make_job, make_sequence

WAIT_S = 30


def test_peer_expires_after_its_timeout_of_punctual_ticks() -> None:
    expired: list[str] = []
    owes = True
    dog = Watchdog(0.8, 2.0)
    assert dog.tick_s == pytest.approx(0.1)
    watch = dog.watch(0.8, lambda: expired.append("x"), lambda: owes)
    for _ in range(7):
        watch.advance(0.1)
    watch.quiet_s = 0.0  # it was heard
    for _ in range(7):
        watch.advance(0.1)
    assert not expired
    owes = False
    watch.advance(0.1)  # nothing owed, nothing missed
    owes = True
    for _ in range(9):
        watch.advance(0.1)
    assert expired == ["x"] and watch.expired


async def test_event_loop_stall_does_not_count_as_peer_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tick that comes a minute late counts as two that come in time."""
    clock_s, ticks = 0.0, iter([60.0, 60.0, 0.01, 0.01])
    enough = asyncio.Event()

    async def tick(seconds: float) -> None:
        nonlocal clock_s
        passed_s = next(ticks, None)
        if passed_s is None:
            enough.set()
            await asyncio.Event().wait()
        else:
            clock_s += passed_s

    dog = Watchdog(0.08)
    watch = dog.watch(0.08, lambda: None)
    monkeypatch.setattr("quire_router.watchdog.asyncio.sleep", tick)
    monkeypatch.setattr("quire_router.watchdog.asyncio.get_running_loop", lambda: SimpleNamespace(time=lambda: clock_s))
    running = asyncio.create_task(dog.run())
    await enough.wait()
    assert watch.quiet_s == pytest.approx(0.06) and not watch.expired
    running.cancel()


async def test_one_watch_that_fails_leaves_the_others_watched() -> None:
    dog = Watchdog(0.01)
    expired: list[str] = []
    enough = asyncio.Event()

    def fail() -> None:
        raise RuntimeError("broken")

    def drop_other() -> None:
        expired.append("first")
        dog.drop(dropped)

    dog.watch(0.01, fail)
    dog.watch(0.01, drop_other)
    dropped = dog.watch(0.01, lambda: expired.append("dropped"))
    dog.watch(0.05, enough.set)
    running = asyncio.create_task(dog.run())
    async with asyncio.timeout(WAIT_S):
        await enough.wait()
    assert expired == ["first"] and not running.done()
    running.cancel()


@pytest.mark.parametrize(
    ("error", "admitted", "wanted"),
    [
        (Unavailable("WORKER_LOST", "m", "f"), True, ("worker_lost", True, False, False)),
        (Unavailable("WORKER_LOST", "m", "f"), False, ("worker_lost", False, False, False)),
        (Internal("PAGES_LOST", "m", "f"), True, ("pages_lost", True, False, False)),
        (Unavailable("DRAINING", "m", "f"), True, ("draining", False, True, False)),
        (Unavailable("WORKER_NOT_READY", "m", "f"), False, ("not_ready", False, True, False)),
        (Overloaded("SESSION_TOO_SLOW", "m", "f"), True, ("too_slow", False, False, False)),
        (Overloaded("QUEUE_FULL", "m", "f"), False, ("full", False, True, True)),
        (Unavailable("SOMETHING_ELSE", "m", "f"), True, ("unavailable", True, False, False)),
        (InvalidArgument("PROMPT_TOO_LONG", "m", "f"), False, None),
        (FailedPrecondition("HELLO_MISSING", "m", "f"), True, None),
        (Internal("INTERNAL", "m", "f"), True, ("failed", True, False, False)),
        (Internal("NAN_LOGITS", "m", "f"), True, ("failed", True, False, False)),
        (FailedPrecondition("PAGE_TAKEN", "m", "f"), True, ("failed", True, False, False)),
        (FailedPrecondition("SLOT_BUSY", "m", "f"), False, ("failed", True, False, False)),
    ],
)
def test_engine_errors_are_classified(
    error: QuireError, admitted: bool, wanted: tuple[str, bool, bool, bool] | None
) -> None:
    failure = failure_of("i", error, admitted=admitted)
    assert (failure and (failure.reason, failure.suspect, failure.refused, failure.busy)) == wanted


def test_resubmission_continues_from_the_complete_tokens() -> None:
    sequence, entry = make_sequence(make_job(logprobs=0), DeltaQueue()), pack_entry(1, -1.0, 1, b"", b"")
    sequence.engine.add_row(pack_i32([5, 6, 7]), 0, 1)
    sequence.engine.entries.append(entry)
    sequence.engine.entries.append(entry)  # the third token's never came
    sequence.close_attempt()
    sequence.begin_attempt(40)
    spec = sequence.to_submit()
    assert spec.output_ids.tolist() == [5, 6] and spec.prompt_ids.tolist() == [112, 113]
    assert (sequence.handle, sequence.attempt, sequence.context.attempt, sequence.engine.resumed) == (40, 1, 1, True)
    assert not sequence.engine.finish
    sequence.engine.add_row(pack_i32([1] * 8), 0, 1)
    for _ in range(8):
        sequence.engine.entries.append(entry)
    sequence.close_attempt()
    assert sequence.engine.finish == LENGTH  # max_tokens have come: nobody needs to say so


async def test_submits_are_encoded_late_and_in_bounded_messages() -> None:
    sequences: dict[int, SequenceState] = {}
    out = SessionOutgoing("router", sequences.__contains__)
    made = [make_sequence(make_job(), DeltaQueue(), index) for index in range(10)]
    for sequence in made:
        sequence.spec = Sequence(np.zeros(700_000, np.int32), Stop(10))
        sequences[sequence.handle] = sequence
        out.submit(sequence.handle, sequence)
    del sequences[made[3].handle]
    out.abort(made[3].handle)
    messages = aiter(out.messages())
    assert (await anext(messages)).HasField("hello")
    sent: list[sb.SessionRequest] = []
    while sum(len(message.submit) for message in sent) < 9:
        sent.append(await anext(messages))
    handles = [submit.handle for message in sent for submit in message.submit]
    assert handles == [sequence.handle for sequence in made if sequence is not made[3]]
    assert max(len(message.submit) for message in sent) == 1  # 2.8 MB each
    assert b"".join(message.abort for message in sent) == pack_i32([made[3].handle])


async def test_submits_with_many_biases_are_split_into_short_messages() -> None:
    """Each bias is put in alone: messages of 64 submits with 1,024 took the router's loop 63 ms, the scheduler's 75."""
    sequences: dict[int, SequenceState] = {}
    out = SessionOutgoing("router", sequences.__contains__)
    controls = LogitControls(logit_bias=tuple((i, 1.0) for i in range(1024)))
    for index in range(256):
        sequence = make_sequence(make_job(), DeltaQueue(), index)
        sequence.spec = Sequence(np.zeros(8, np.int32), Stop(10), Sampling(controls=controls))
        sequences[sequence.handle] = sequence
        out.submit(sequence.handle, sequence)
    messages = aiter(out.messages())
    assert (await anext(messages)).HasField("hello")
    sent = 0
    while sent < 256:
        message = await anext(messages)
        assert 0 < sum(len(submit.sequence.sampling.logit_bias) for submit in message.submit) <= 5 * 1024
        sent += len(message.submit)


async def test_tickets_of_long_prompts_are_split_into_bounded_messages() -> None:
    """40 of a million tokens each made one message of 84 MiB, with which gRPC ends the session of all."""
    handles = set(range(40))
    out = SessionOutgoing("router", handles.__contains__)
    geometry = PageGeometry(16, (), b"n" * 32)
    hashes = tuple(bytes([n]) * 32 for n in range(256)) * 256
    ticket = Ticket(b"t" * 16, "prefill", Epoch(1, 1), hashes, b"", 0, b"k" * 32, (), geometry)
    for handle in sorted(handles):
        out.hand_over(handle, ticket, b"", give_up=False)
    handles.discard(7)
    messages = aiter(out.messages())
    assert (await anext(messages)).HasField("hello")
    told: list[int] = []
    while len(told) < 39:
        message = await anext(messages)
        assert message.ByteSize() < 8 * 1024 * 1024
        told += [handover.handle for handover in message.handover]
    assert told == sorted(handles)


class _Stub:
    """A tokenizer in this process, that takes no rows before `take` is set."""

    def __init__(self) -> None:
        self.instance = "t"
        self.stub = self
        self.take = asyncio.Event()
        self.messages: list[tb.DetokenizeRequest] = []

    def Detokenize(self, requests: AsyncIterator[tb.DetokenizeRequest]) -> Any:
        async def taken() -> AsyncIterator[tb.DetokenizeRequest]:
            async for request in requests:
                self.messages.append(request)
                yield request
                if len(self.messages) == 2:  # it is there, and has opened what there was
                    await self.take.wait()

        return _Call(FakeTokenizer().Detokenize(taken(), None))

    async def pick(self, wait_s: float) -> _Stub:
        return self

    def suspect(self) -> None:
        pass


class _Call:
    def __init__(self, answers: AsyncIterator[tb.DetokenizeResponse]) -> None:
        self._answers = answers

    def __aiter__(self) -> AsyncIterator[tb.DetokenizeResponse]:
        return self._answers

    def cancel(self) -> None:
        pass


async def test_waiting_steps_for_a_slow_tokenizer_are_joined() -> None:
    tokenizer: Any = _Stub()
    sequences: dict[int, SequenceState] = {}
    stream = DetokenizeStream(tokenizer, Watchdog(60.0), RouterConfig(), sequences, lambda sequence: None)
    running = asyncio.ensure_future(stream.run())
    made = [make_sequence(make_job(), DeltaQueue(), index) for index in range(3)]
    for sequence in made:
        sequences[sequence.handle] = sequence
    async with asyncio.timeout(WAIT_S):
        while len(tokenizer.messages) < 2:
            await asyncio.sleep(0)
    steps = 5 * MAX_STEPS
    handles = pack_i32([sequence.handle for sequence in made])
    for step in range(steps):
        last = step == steps - 1
        token = [97 + step % 26, 98, 99]
        for sequence, value in zip(made, token, strict=True):
            sequence.engine.add_row(pack_i32([value]), LENGTH if last else 0, 1)
        stream.rows(handles, pack_i32([1, 1, 1]), pack_i32(token), bytes([LENGTH if last else 0] * 3))
        assert stream.backlog <= MAX_STEPS
        if step == steps // 2:
            gone = sequences.pop(made[2].handle)
            stream.close(gone.handle)
    tokenizer.take.set()
    async with asyncio.timeout(WAIT_S):
        while sequences:
            await asyncio.sleep(0.001)
    assert len(tokenizer.messages) <= MAX_STEPS + 2
    letters = "abcdefghijklmnopqrstuvwxyz"
    assert (
        made[0].client.take_delta().text == (letters * steps)[:steps]
        and made[1].client.take_delta().text == "b" * steps
    )
    assert made[0].client.ended and made[1].client.ended and not made[2].client.ended
    told = [handle for message in tokenizer.messages for handle in i32(message.handle).tolist()]
    assert told.count(made[2].handle) <= MAX_STEPS  # what came before it left may still go
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
