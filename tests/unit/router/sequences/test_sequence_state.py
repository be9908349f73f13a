"""The sequence state passes each delta from engine and tokenizer to the client once, and joins deltas that wait."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from quire.v1 import common_pb2
from quire_common.columns import pack_i32
from quire_common.errors import Unavailable
from quire_router.off_loop import MOST_VALUES
from quire_router.sequences.delta import FINISH_NAMES, STOP
from quire_router.sequences.delta_queue import DeltaQueue
from tests.unit.router.makers import make_generation, make_job, make_sequence


def test_finish_numbers_match_the_contract() -> None:
    for number, name in FINISH_NAMES.items():
        assert common_pb2.FinishReason.Name(number) == f"FINISH_REASON_{name.upper()}"
    assert set(FINISH_NAMES) == set(common_pb2.FinishReason.values()) - {0}
    assert STOP == common_pb2.FINISH_REASON_STOP


def test_rows_are_joined_until_the_delta_is_taken() -> None:
    sequence = make_sequence(make_job(token_ids=True), DeltaQueue())
    for i, text in enumerate(["a", "", "bc"]):
        sequence.engine.add_row(pack_i32([i, i + 10]), 0, 1)
        assert not sequence.add_text(text, -1, 2)
    delta = sequence.client.take_delta()
    assert (delta.text, delta.tokens, delta.finish) == ("abc", 6, 0)
    assert np.frombuffer(delta.token_ids, np.int32).tolist() == [0, 10, 1, 11, 2, 12]
    assert sequence.client.take_delta().tokens == 0


def test_long_delta_is_split_between_tokens() -> None:
    sequence = make_sequence(make_job(token_ids=True, logprobs=0), DeltaQueue())
    sequence.engine.add_row(pack_i32([1, 2, 3, 4, 5]), 2, 1)
    sequence.text.add_offsets([1, 1, 3, 4, 6])
    assert sequence.add_text("aébcdé", -1, 5)
    parts = [sequence.client.take_delta(2) for _ in range(3)]
    assert [(part.text, part.tokens, part.finish) for part in parts] == [("a", 2, 0), ("ébc", 2, 0), ("dé", 1, 2)]
    assert b"".join(part.token_ids for part in parts) == pack_i32([1, 2, 3, 4, 5])
    assert [offset for part in parts for offset in part.offsets] == [1, 1, 3, 4, 6]
    assert sequence.client.waiting_tokens == 0


def test_text_after_a_split_waits_for_the_tokenizer() -> None:
    sequence = make_sequence(make_job(logprobs=0), DeltaQueue())
    sequence.engine.add_row(pack_i32([1, 2, 3]), 0, 1)
    sequence.text.add_offsets([2, 4, 6])
    sequence.add_text("abc", -1, 3)  # the rest may become a stop string
    assert [sequence.client.take_delta(2).text for _ in range(2)] == ["abc", ""]
    sequence.engine.add_row(pack_i32([4]), 2, 2)
    sequence.text.add_offsets([6])
    assert sequence.add_text("def", -1, 1)
    assert sequence.client.take_delta(2).text == "def"


async def test_waiting_logprobs_are_delivered_in_bounded_parts() -> None:
    generation = make_generation(make_job(logprobs=20, stream=True))
    (sequence,) = generation.sequences
    tokens = MOST_VALUES // 22 + 5
    sequence.engine.add_row(pack_i32(range(tokens)), 2, 1)
    sequence.text.add_offsets(list(range(1, tokens + 1)))
    assert sequence.add_text("x" * tokens, -1, tokens)
    first, second = await generation.next_deltas(), await generation.next_deltas()
    assert [len(first), len(second)] == [1, 1]
    assert [(part.tokens, part.finish) for part in (*first, *second)] == [(MOST_VALUES // 22, 0), (5, 2)]
    assert "".join(part.text for part in (*first, *second)) == "x" * tokens and generation.running == 0


def test_sequence_ends_when_the_text_of_its_last_row_arrives() -> None:
    sequence = make_sequence(make_job(), DeltaQueue())
    sequence.engine.add_row(pack_i32([1]), 0, 1)
    sequence.engine.add_row(pack_i32([2]), 2, 2)
    assert not sequence.add_text("a", -1, 1)
    assert sequence.client.take_delta().finish == 0
    assert sequence.add_text("b", -1, 1)
    assert sequence.client.take_delta().finish == 2


def test_stop_string_ends_the_sequence_and_cuts_the_token_count() -> None:
    sequence = make_sequence(make_job(stop=("x", "yy")), DeltaQueue())
    sequence.engine.add_row(pack_i32([1, 2, 3, 4]), 0, 1)
    sequence.engine.add_row(pack_i32([5]), 2, 2)
    assert sequence.add_text("ab", 1, 3)
    delta = sequence.client.take_delta()
    assert (delta.text, delta.tokens, delta.finish, delta.stop_reason) == ("ab", 3, STOP, "yy")


def test_new_tokenizer_gets_the_unconfirmed_tokens() -> None:
    sequence = make_sequence(make_job(), DeltaQueue())
    sequence.engine.add_row(pack_i32([1, 2]), 0, 1)
    sequence.engine.add_row(pack_i32([3]), 0, 2)
    sequence.add_text("é", -1, 2)
    assert sequence.unconfirmed_ids() == pack_i32([3])
    assert (sequence.text.chars_sent, sequence.text.confirmed) == (1, 2)


async def test_consumer_gets_waiting_deltas_before_the_error() -> None:
    generation = make_generation(make_job(n=2))
    first, second = generation.sequences
    waiting = asyncio.ensure_future(generation.next_deltas())
    await asyncio.sleep(0)
    for sequence in (first, second, first):
        sequence.engine.add_row(pack_i32([1]), 0, 1)
        sequence.add_text("a", -1, 1)
    assert [(d.index, d.text) for d in await waiting] == [(0, "aa"), (1, "a")]
    second.engine.add_row(pack_i32([1]), 0, 1)
    second.add_text("b", -1, 1)
    first.fail(Unavailable("GONE", "x", "y"))
    assert [d.text for d in await generation.next_deltas()] == ["b"]
    with pytest.raises(Unavailable):
        await generation.next_deltas()


async def test_no_deltas_are_built_for_a_disconnected_client() -> None:
    generation = make_generation(make_job(logprobs=20, stream=True))
    (sequence,) = generation.sequences
    sequence.engine.add_row(pack_i32([1]), 0, 1)
    sequence.text.add_offsets([1])
    sequence.add_text("a", -1, 1)
    generation.abandon(Unavailable("GONE", "x", "y"))
    with pytest.raises(Unavailable):
        await generation.next_deltas()


async def test_without_streaming_there_is_one_delta() -> None:
    generation = make_generation(make_job(stream=False))
    (sequence,) = generation.sequences
    waiting = asyncio.ensure_future(generation.next_deltas())
    for i in range(5):
        sequence.engine.add_row(pack_i32([i]), 2 if i == 4 else 0, 1)
        sequence.add_text("a", -1, 1)
        await asyncio.sleep(0)
        assert waiting.done() == (i == 4)
    assert [d.text for d in await waiting] == ["aaaaa"]
    assert generation.running == 0
