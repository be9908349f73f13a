from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire_common.errors import InvalidArgument, QuireError
from quire_tokenizer.detokenize import detokenizer, long_rows
from quire_tokenizer.detokenize.detokenizer import (
    Detokenizer,
    EndedRequest,
    OpenRequest,
    StepText,
    StreamLimits,
    TokenRows,
)
from quire_tokenizer.detokenize.long_answer import MOST_CHARS, in_parts
from quire_tokenizer.vocabulary import Vocabulary
from tests.tiers import examples

Row = tuple[int, list[int], int]
STOP, LENGTH = 1, 2


def columns_of(rows: Sequence[Row]) -> TokenRows:
    return TokenRows(
        np.array([handle for handle, _, _ in rows], np.int32),
        np.array([len(ids) for _, ids, _ in rows], np.int32),
        np.array([i for _, ids, _ in rows for i in ids], np.int32),
        np.array([finish for _, _, finish in rows], np.uint8),
    )


class Stream:
    """A detokenizer with its answers."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.ended: list[EndedRequest] = []
        self.detokenizer = Detokenizer(vocabulary, StreamLimits(4, 3, 8, 2, 5), self.ended.append)
        self.encode = vocabulary.tokenizer.encode

    def open(self, handle: int, stop: tuple[str, ...] = (), **options: object) -> None:
        prior = np.array(options.pop("prior_ids", ()), np.int32)
        list(self.detokenizer.open(OpenRequest(handle, stop, prior_ids=prior, **options)))  # type: ignore[arg-type]  # tests' shorthand

    def ids(self, text: str) -> list[int]:
        ids: list[int] = self.encode(text, add_special_tokens=False).ids
        return ids

    def step(self, *rows: Row) -> StepText:
        answer = StepText()
        self.detokenizer.step(columns_of(rows), answer)
        return answer


@pytest.fixture
def stream(vocabulary: Vocabulary) -> Stream:
    return Stream(vocabulary)


def test_many_requests_in_one_step(stream: Stream) -> None:
    stream.open(7)
    stream.open(9, ("END",), trace="t")
    answer = stream.step((9, stream.ids("hello EN"), 0), (7, stream.ids("the"), 0))
    assert (answer.handle, answer.text, answer.stop_index) == ([9, 7], ["hello ", "the"], [-1, -1])
    answer = stream.step((7, stream.ids(" dog"), LENGTH), (9, [*stream.ids("D"), *stream.ids(" more")], 0))
    assert (answer.handle, answer.text, answer.stop_index) == ([7, 9], [" dog", ""], [-1, 0])
    assert answer.used == [len(stream.ids(" dog")), 1]
    assert len(stream.detokenizer) == 0
    assert [(e.stopped_by_string, e.chars, e.trace) for e in stream.ended] == [(False, 7, None), (True, 6, "t")]


def test_rows_of_forgotten_and_unknown_handles_are_passed_over(stream: Stream) -> None:
    stream.open(1, ("END",))
    stream.open(2)
    assert stream.step((1, stream.ids("END"), 0)).stop_index == [0]
    answer = stream.step((1, stream.ids("late"), 0), (2, stream.ids("hello"), 0), (3, stream.ids("who"), STOP))
    assert (answer.handle, answer.text, answer.errors) == ([2], ["hello"], [])
    stream.detokenizer.close([2, 99])
    assert stream.step((2, stream.ids("x"), 0)).handle == []


def test_a_handle_can_be_used_again(stream: Stream) -> None:
    stream.open(1)
    stream.step((1, stream.ids("hello"), LENGTH))
    stream.open(1)
    assert stream.step((1, stream.ids("dog"), 0)).text == ["dog"]


def test_offsets_of_those_that_asked(stream: Stream) -> None:
    stream.open(1, want_offsets=True)
    stream.open(2)
    hello, dog = stream.ids("hello"), stream.ids(" dog")
    answer = stream.step((1, [*hello, *dog], 0), (2, hello, 0))
    assert len(answer.offsets) == len(hello) + len(dog)
    assert answer.offsets[-1] == len("hello dog")


def test_a_bad_token_ends_its_request_alone(stream: Stream) -> None:
    stream.open(1)
    stream.open(2)
    answer = stream.step((1, [5, -3], 0), (2, stream.ids("hello"), 0))
    assert [(handle, error.code) for handle, error in answer.errors] == [(1, "BAD_TOKEN_ID")]
    assert answer.text == ["hello"]
    assert len(stream.detokenizer) == 1


def test_a_bad_token_of_a_request_that_owes_long_text_leaves_nothing_owed(
    stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(detokenizer, "_LONG_CHARS", 2)
    stream.open(1, prior_ids=stream.ids("hello"))
    assert stream.detokenizer.owes_long
    stream.step((1, [-3], 0))
    assert not stream.detokenizer.owes_long


def test_ids_beyond_the_vocabulary_add_nothing(stream: Stream) -> None:
    stream.open(1)
    assert stream.step((1, [*stream.ids("hello"), 2**31 - 1], LENGTH)).text == ["hello"]


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"stop": ("x",) * 100_000}, "TOO_MANY_STOP_STRINGS"),
        ({"stop": ("a", "")}, "EMPTY_STOP_STRING"),
        ({"stop": ("x" * 9,)}, "STOP_STRING_TOO_LONG"),
        ({"stop_token_ids": frozenset({1, 2, 3})}, "TOO_MANY_STOP_TOKENS"),
        ({"prior_ids": (1, -1)}, "BAD_TOKEN_ID"),
        ({"prior_ids": (1,) * 6}, "TOO_MANY_TOKEN_IDS"),
        ({"chars_sent": 1}, "RESUME_MISMATCH"),
        ({"handle": 1}, "HANDLE_IN_USE"),
    ],
)
def test_requests_that_cannot_be(stream: Stream, options: dict[str, object], code: str) -> None:
    stream.open(1)
    with pytest.raises(QuireError) as caught:
        stream.open(**({"handle": 2} | options))  # type: ignore[arg-type]  # tests' shorthand
    assert caught.value.code == code
    assert stream.step((1, stream.ids("hello"), 0), (2, stream.ids("hello"), 0)).text == ["hello"]


def test_handles_are_bounded(stream: Stream) -> None:
    for handle in range(4):
        stream.open(handle)
    with pytest.raises(QuireError, match="TOO_MANY_HANDLES"):
        stream.open(4)
    stream.detokenizer.close([0])
    stream.open(4)


def test_draining_lets_the_open_finish_and_no_other_start(stream: Stream) -> None:
    stream.open(1)
    stream.detokenizer.drain()
    with pytest.raises(QuireError, match="TOKENIZER_DRAINING"):
        stream.open(2)
    assert stream.step((1, stream.ids("hello"), LENGTH)).text == ["hello"]


@pytest.mark.parametrize(("count", "tokens"), [([2], [1]), ([-1, 2], [1]), ([0], [1])])
def test_columns_that_disagree(stream: Stream, count: list[int], tokens: list[int]) -> None:
    rows = TokenRows(
        np.zeros(len(count), np.int32),
        np.array(count, np.int32),
        np.array(tokens, np.int32),
        np.zeros(len(count), np.uint8),
    )
    with pytest.raises(InvalidArgument, match="BAD_COLUMN"):
        stream.detokenizer.step(rows, StepText())


def test_eos_is_not_shown_and_the_clients_stop_tokens_neither(stream: Stream) -> None:
    dog = stream.ids("dog")
    for extra, last in ((frozenset[int](), 2), (frozenset({dog[0]}), dog[0])):
        stream.open(1, skip_special_tokens=False, stop_token_ids=extra)
        answer = stream.step((1, [*stream.ids("hello"), last], STOP))
        assert answer.text == ["hello"]
        assert answer.used == [len(stream.ids("hello")) + 1]


def test_a_history_in_parts_is_the_history(vocabulary: Vocabulary) -> None:
    """Each message of a stream stays small, however long what is taken up was."""
    text = "hello the dog END"
    whole, parted = Stream(vocabulary), Stream(vocabulary)
    ids = whole.ids(text)
    whole.detokenizer._limits = parted.detokenizer._limits = StreamLimits(4, 3, 8, 2, 100)
    for first, *rest in ([ids[:7]], [ids[:3], ids[3:5], ids[5:7]], [[], ids[:7]]):
        stream = whole if not rest else parted
        stream.open(1, ("END",), chars_sent=3, prior_ids=first, more_prior=bool(rest))
        while rest:
            assert stream.step((1, ids[:1], 0)).handle == []  # its rows come after the last part
            stream.open(1, prior_ids=rest.pop(0), more_prior=bool(rest), further=True)
        assert stream.step((1, ids[7:], 0)).text == [text[3:-3]]


def test_parts_of_what_was_refused_or_closed_are_passed_over(stream: Stream) -> None:
    stream.open(1, prior_ids=[5], more_prior=True, further=True)
    stream.open(2, prior_ids=[5], more_prior=True)
    stream.detokenizer.close([2])
    stream.open(2, prior_ids=[5], further=True)
    assert len(stream.detokenizer) == 0
    with pytest.raises(QuireError, match="TOO_MANY_TOKEN_IDS"):
        stream.open(3, prior_ids=[5] * 4, more_prior=True)
        stream.open(3, prior_ids=[5] * 2, further=True)
    assert len(stream.detokenizer) == 0


def test_a_long_history_gives_others_their_turn(vocabulary: Vocabulary) -> None:
    detokenizer = Detokenizer(vocabulary, StreamLimits(4, 3, 8, 2, 1 << 20), lambda ended: None)
    turns = detokenizer.open(OpenRequest(1, prior_ids=np.full(100_000, 5, np.int32)))
    assert len(list(turns)) == 48


def test_a_long_answer_goes_in_parts(stream: Stream) -> None:
    answer = StepText()
    rows = [(2, "a" * 10, -1, 3), (3, "b" * 200_000, 1, 4), (5, "", -1, 1), (4, "c" * 65_536, -1, 5)]
    for handle, text, stop_index, used in rows:
        answer.handle.append(handle)
        answer.text.append(text)
        answer.stop_index.append(stop_index)
        answer.used.append(used)
    answer.offsets, answer.offset_handles = [1, 2, 3, 4, 5], [3, 5]
    told: list[tuple[int, str, int, int]] = []
    offsets, begun = list[int](), ""
    for part, cut in in_parts(answer):
        assert sum(map(len, part.text)) <= MOST_CHARS
        found = list(zip(part.handle, part.text, part.stop_index, part.used, strict=True))
        found[0] = (found[0][0], begun + found[0][1], *found[0][2:])
        begun = found.pop()[1] if cut else ""
        told += found
        offsets += part.offsets
    assert (told, offsets, begun) == (rows, answer.offsets, "")


ROWS = st.tuples(
    st.sampled_from([1, 2, 3, 9]), st.lists(st.integers(0, 700), max_size=9), st.sampled_from([0, 0, 0, 1])
)


@examples(400)
@given(rows=st.lists(ROWS, min_size=1, max_size=5), turn=st.integers(1, 6))
def test_a_long_step_in_turns_is_the_step(vocabulary: Vocabulary, rows: list[Row], turn: int) -> None:
    answers = []
    for in_turns in (False, True):
        stream = Stream(vocabulary)
        stream.open(1, ("e", "th"))
        stream.open(2, want_offsets=True)
        stream.open(3, ("a",), want_offsets=True, min_tokens=3)
        answers.append(answer := StepText())
        if not in_turns:
            stream.detokenizer.step(columns_of(rows), answer)
            continue
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(long_rows, "TURN_TOKENS", turn)
            pauses = list(long_rows.step_in_turns(stream.detokenizer.step, columns_of(rows), answer))
        assert len(pauses) >= sum(len(ids) for _, ids, _ in rows) // turn
    for answer in answers:
        answer.offset_handles = sorted(set(answer.offset_handles))
    assert answers[0] == answers[1]


def test_a_bad_token_late_in_a_long_step_ends_its_request_without_text(stream: Stream) -> None:
    for handle in (1, 2):
        stream.open(handle)
    hello = stream.ids("hello")
    ids = [*hello * long_rows.TURN_TOKENS, -3]
    answer = StepText()
    list(long_rows.step_in_turns(stream.detokenizer.step, columns_of([(1, ids, 0), (2, hello, 0)]), answer))
    assert [(handle, error.code) for handle, error in answer.errors] == [(1, "BAD_TOKEN_ID")]
    assert (answer.handle, answer.text) == ([2], ["hello"])


@pytest.mark.parametrize(("count", "tokens"), [([2], [1]), ([-1, 2], [1]), ([0], [1])])
def test_long_steps_that_do_not_add_up(count: list[int], tokens: list[int]) -> None:
    zeros = [0] * len(count)
    columns = (np.array(column, np.int32) for column in (zeros, count, tokens))
    rows = TokenRows(next(columns), next(columns), next(columns), np.array(zeros, np.uint8))
    with pytest.raises(InvalidArgument, match="BAD_COLUMN"):
        list(long_rows.step_in_turns(lambda rows, answer: None, rows, StepText()))
