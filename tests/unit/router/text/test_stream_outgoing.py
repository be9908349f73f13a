"""A Detokenize stream sends small messages, and opens suspected sequences one at a time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest

from quire.v1 import tokenizer_pb2 as tb
from quire_common.columns import i32, pack_i32
from quire_router.sequences.delta import LENGTH
from quire_router.sequences.delta_queue import DeltaQueue
from quire_router.sequences.sequence_state import SequenceState
from quire_router.text.rows_codec import MESSAGE_BYTES, cut_rows, join_rows, rows_of
from quire_router.text.stream_outgoing import DetokenizeOutgoing
from tests.fakes.fake_tokenizer import FakeTokenizer
from tests.unit.router.makers import make_job, make_sequence

MOST_BYTES = 4 * MESSAGE_BYTES


class Rig:
    """The sending half of a stream, and a tokenizer that is asked message by message."""

    def __init__(self) -> None:
        self.sequences: dict[int, SequenceState] = {}
        self.failed: list[int] = []
        self.out = DetokenizeOutgoing(self.sequences, lambda sequence, error: self.failed.append(sequence.handle))
        self.messages: AsyncIterator[tb.DetokenizeRequest] = aiter(self.out.messages())
        self._next: asyncio.Future[tb.DetokenizeRequest] | None = None
        self._tokenizer, self._texts = FakeTokenizer(), dict[int, Any]()

    def sequence(
        self, index: int, confirmed: int, unconfirmed: int, *, finish: int = 0, strikes: int = 0, stops: int = 0
    ) -> SequenceState:
        stop = tuple(f"{number:03d}" * 170 for number in range(stops))
        made = make_sequence(make_job(stop=stop), DeltaQueue(), index)
        made.engine.add_row(pack_i32([97 + i % 26 for i in range(confirmed + unconfirmed)]), finish, 1)
        made.text.start_after(confirmed, confirmed, with_offsets=False)
        for _ in range(strikes):
            made.text.add_strike()
        self.sequences[made.handle] = made
        self.out.open(made)
        return made

    async def next(self) -> tb.DetokenizeRequest:
        if self._next is None:
            self._next = asyncio.ensure_future(anext(self.messages))
        # Shielded: a generator that is cancelled as it waits has ended.
        message = await asyncio.wait_for(asyncio.shield(self._next), 10)
        self._next = None
        assert message.ByteSize() < MOST_BYTES
        return message

    async def all_that_may_be_sent(self) -> list[tb.DetokenizeRequest]:
        """Before the next answer."""
        sent = list[tb.DetokenizeRequest]()
        while True:
            following = asyncio.ensure_future(self.next())
            done, _ = await asyncio.wait({following}, timeout=0.02)
            if not done:
                following.cancel()
                return sent
            sent.append(following.result())

    def answer(self, message: tb.DetokenizeRequest) -> list[int]:
        """The handles that have ended by it."""
        response = self._tokenizer._step(message, self._texts)
        cleared = self.out.note_answer()
        if cleared is not None:
            cleared.text.clear_strikes()
        columns = (i32(column).tolist() for column in (response.handle, response.stop_index, response.used))
        ended = []
        for handle, stop_index, used, text in zip(*columns, response.text, strict=True):
            if handle in self.sequences and self.sequences[handle].add_text(text, stop_index, used):
                del self.sequences[handle]
                ended.append(handle)
        return ended

    def step(self, *sequences: SequenceState, finish: int = 0) -> None:
        """A step of the engine, one more token each."""
        for sequence in sequences:
            sequence.engine.add_row(pack_i32([97 + len(sequence.engine.output_ids) // 4 % 26]), finish, 1)
        handles = [sequence.handle for sequence in sequences]
        tokens = [97 + (len(sequence.engine.output_ids) // 4 - 1) % 26 for sequence in sequences]
        self.out.rows(
            tb.DetokenizeRequest(
                handle=pack_i32(handles),
                count=pack_i32([1] * len(handles)),
                token=pack_i32(tokens),
                finish=bytes([finish] * len(handles)),
            )
        )


@pytest.fixture
async def rig() -> Rig:
    made = Rig()
    made.answer(await made.next())
    return made


def letters(start: int, end: int) -> str:
    return "".join(chr(97 + i % 26) for i in range(start, end))


async def test_long_histories_are_sent_in_parts_between_rows_of_others(rig: Rig) -> None:
    """2,048 streams, and one of 300,000 tokens, are taken up after a tokenizer's death."""
    longest = rig.sequence(0, 300_000, 0)
    made = [rig.sequence(index, 1500, 10) for index in range(1, 65)]
    short = rig.sequence(65, 4, 2)
    texts = {sequence.handle: "" for sequence in (short, longest, *made)}
    waited = 0
    while rig.out._opening or rig.out._rows:
        rig.step(short)
        rig.answer(message := await rig.next())
        opened = {part.handle for part in message.open}
        waited += short.handle not in i32(message.handle).tolist() and short.handle not in opened
    assert waited == 0  # each message has its newest row
    rig.step(*rig.sequences.values(), finish=LENGTH)
    rig.answer(await rig.next())
    assert not rig.sequences
    for sequence in (short, longest, *made):
        texts[sequence.handle] += sequence.client.take_delta().text
        total = len(sequence.engine.output_ids) // 4
        assert texts[sequence.handle] == letters(total - len(texts[sequence.handle]), total)
    assert len(texts[longest.handle]) == 1 and len(texts[made[0].handle]) == 11


async def test_rows_that_arrive_during_an_open_are_sent_exactly_once(rig: Rig) -> None:
    made = [
        rig.sequence(index, drawn, 30_000 * (index % 3)) for index, drawn in enumerate((0, 90_000, 5, 50_000, 20_000))
    ]
    drawn, waiting = random.Random(5), list[tb.DetokenizeRequest]()
    for turn in range(200):
        running = [sequence for sequence in made if sequence.handle in rig.sequences]
        rig.step(*drawn.sample(running, drawn.randint(1, len(running))))
        if drawn.random() < 0.6:
            waiting.append(await rig.next())
        if waiting and drawn.random() < 0.6:
            assert not rig.answer(waiting.pop(0)), turn
    rig.step(*made, finish=LENGTH)
    ended = list[int]()
    while rig.sequences:
        waiting = waiting or [await rig.next()]
        ended += rig.answer(waiting.pop(0))
    assert sorted(ended) == [sequence.handle for sequence in made]
    for sequence, confirmed in zip(made, (0, 90_000, 5, 50_000, 20_000), strict=True):
        assert sequence.client.take_delta().text == letters(confirmed, len(sequence.engine.output_ids) // 4)


async def test_rows_wait_behind_at_most_four_messages(rig: Rig) -> None:
    """128 sequences with 64 stop strings of 512 characters each took rows of others 400 ms behind them."""
    running = rig.sequence(0, 4, 2)
    rig.answer(await rig.next())
    opened = [rig.sequence(index, 0, 0, stops=64) for index in range(1, 129)]
    waiting = await rig.all_that_may_be_sent()
    rig.step(running)
    waiting += await rig.all_that_may_be_sent()
    assert len(waiting) <= 4 and running.handle in i32(waiting[-1].handle).tolist()
    rig.answer(waiting.pop(0))
    turns = 0
    while rig.out._opening or waiting:
        waiting = waiting or [await rig.next()]
        rig.answer(waiting.pop(0))
        turns += 1
    assert len(opened) / 2 <= turns <= 2 * len(opened)


async def test_suspect_is_opened_with_nothing_else_in_flight(rig: Rig) -> None:
    first, second = rig.sequence(0, 20_000, 3, strikes=1), rig.sequence(1, 10, 3, strikes=1)
    other = rig.sequence(2, 10, 3)
    suspected, told = {first.handle, second.handle}, list[set[int]]()
    waiting = list[tb.DetokenizeRequest]()
    while first.text.strikes or second.text.strikes:
        rig.step(other)
        waiting += await rig.all_that_may_be_sent()
        in_flight = rig.out.unanswered(oldest=False)
        assert not in_flight & suspected or len(in_flight) == 1, in_flight
        told.append(in_flight)
        rig.answer(waiting.pop(0))
    assert told.count({first.handle}) >= 3 and told.index({second.handle}) > told.index({first.handle})
    assert told.count({other.handle}) >= 3  # others wait for no more than one message of a suspect


async def test_next_suspect_is_opened_when_the_first_leaves(rig: Rig) -> None:
    first, second = rig.sequence(0, 50_000, 3, strikes=1), rig.sequence(1, 10, 3, strikes=1)
    rig.answer(await rig.next())
    del rig.sequences[first.handle]
    rig.out.close(first.handle)
    while second.text.strikes:
        rig.answer(await rig.next())
    assert not rig.failed


async def test_departed_suspect_does_not_block_rows_of_others(rig: Rig) -> None:
    running = rig.sequence(0, 4, 2)
    first = await rig.next()
    suspect = rig.sequence(1, 10, 3, strikes=1)
    assert not await rig.all_that_may_be_sent()
    del rig.sequences[suspect.handle]
    rig.out.close(suspect.handle)
    rig.step(running)
    assert not await rig.all_that_may_be_sent()
    rig.answer(first)
    told = set[int]()
    while running.handle not in told:
        message = await rig.next()
        told.update(i32(message.handle).tolist())
        rig.answer(message)


async def test_sequence_ended_during_its_open_leaves_no_messages(rig: Rig) -> None:
    long = rig.sequence(0, 50_000, 3)
    rig.answer(await rig.next())
    del rig.sequences[long.handle]  # as at a stop string, or an error of its own
    while rig.out.owed:
        rig.answer(await rig.next())


async def test_unencodable_sequence_fails_alone(rig: Rig) -> None:
    bad, good = rig.sequence(0, 0, 0), rig.sequence(1, 0, 3)
    bad.stop_token_ids = ("x",)  # type: ignore[assignment]  # what no message can be made of
    rig.answer(await rig.next())
    assert rig.failed == [bad.handle] and good.client.take_delta().text == "abc"


@pytest.mark.parametrize("make", [cut_rows, join_rows])
def test_long_rows_are_split_into_bounded_messages(make: Any) -> None:
    rows = [(2, pack_i32(range(30_000)), LENGTH), (4, pack_i32([7]), 0), (6, b"", LENGTH)]
    step = tb.DetokenizeRequest(
        handle=pack_i32([2, 4, 6]),
        count=pack_i32([30_000, 1, 0]),
        token=b"".join(ids for _, ids, _ in rows),
        finish=bytes([LENGTH, 0, LENGTH]),
    )
    made, more = cut_rows(rows) if make is cut_rows else join_rows([step], {2})
    assert len(made) == 4 and all(len(message.token) <= MESSAGE_BYTES for message in made)
    told = [row for message in made for row in rows_of(message) if row[0] == 2]
    assert b"".join(ids for _, ids, _ in told) == rows[0][1]
    assert [finish for _, _, finish in told] == [0, 0, 0, LENGTH]
    assert more[2] == 3
    others = [row for message in made for row in rows_of(message) if row[0] != 2]
    assert others == (rows[1:] if make is cut_rows else [])
