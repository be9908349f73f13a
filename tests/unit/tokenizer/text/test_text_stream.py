from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire_common.errors import InvalidArgument
from quire_tokenizer.detokenize.stop_matcher import stop_strings
from quire_tokenizer.detokenize.text_stream import FINISH_NONE, FINISH_STOP, StopRules, TextStream
from quire_tokenizer.vocabulary import Vocabulary
from tests.tiers import examples
from tests.unit.tokenizer import folders

LENGTH = 2
PIECES = st.lists(
    st.sampled_from(
        ["END", "EN", "D", "the", " dog", "\n", "汉字", "你", "好", "😀", "👩‍👩‍👧", "é", "a", "b", "<|im_end|>"]
    ),
    max_size=14,
)
STOPS = st.lists(
    st.sampled_from(["END", "ND", "D the", "好", "字你", "😀a", "👩‍👩", "ab", "ba", "a", "\n\n", "dog", "<|im", "é"]),
    max_size=4,
)


@dataclass(frozen=True)
class Options:
    stop: tuple[str, ...] = ()
    include: bool = False
    min_tokens: int = 0
    skip_special: bool = False

    def make(self, vocabulary: Vocabulary, hidden: frozenset[int] = frozenset()) -> TextStream:
        decoder = vocabulary.decoder(skip_special_tokens=self.skip_special, spaces_between_special_tokens=True)
        stops = stop_strings(self.stop) if self.stop else None
        return TextStream(decoder, StopRules(stops, hidden, self.include, self.min_tokens), want_offsets=True)


OPTIONS = st.builds(
    Options,
    stop=STOPS.map(tuple),
    include=st.booleans(),
    min_tokens=st.sampled_from([0, 0, 1, 3, 8]),
    skip_special=st.booleans(),
)


@dataclass(frozen=True)
class Outcome:
    text: str
    stop_index: int
    used: int
    offsets: tuple[int, ...]


def reference(vocabulary: Vocabulary, ids: list[int], options: Options) -> Outcome:
    """On the whole text, with nothing incremental: decode all, find the match, cut."""
    decode = vocabulary.tokenizer.decode
    whole = decode(ids, skip_special_tokens=options.skip_special)
    completed = []
    for n in range(1, len(ids) + 1):
        part = decode(ids[:n], skip_special_tokens=options.skip_special)
        completed.append(next((i for i, (x, y) in enumerate(zip(part, whole, strict=False)) if x != y), len(part)))
    # Byte fallback spoils a whole run of bytes for an incomplete one at its end: what was complete stays so.
    completed = list(accumulate(completed, max))
    immune = completed[min(options.min_tokens, len(ids)) - 1] if options.min_tokens and ids else 0
    ends = [
        (start + len(stop), -len(stop), index)
        for index, stop in enumerate(options.stop)
        for start in range(len(whole))
        if whole.startswith(stop, start) and start + len(stop) > immune
    ]
    if not ends:
        return Outcome(whole, -1, len(ids), tuple(completed))
    end, length, index = min(ends)
    text = whole[: end if options.include else end + length]
    used = next(n for n, chars in enumerate(completed, 1) if chars >= end)
    # Of the last alone is known that it was cut: rows before it had gone by then.
    return Outcome(text, index, used, (*completed[: used - 1], min(completed[used - 1], len(text))))


def stream_through(stream: TextStream, rows: list[list[int]]) -> tuple[Outcome, list[str]]:
    texts, used, offsets = list[str](), 0, list[int]()
    for number, row in enumerate(rows, 1):
        text, stop_index, row_used = stream.advance(row, LENGTH if number == len(rows) else FINISH_NONE)
        texts.append(text)
        used += row_used
        offsets += stream.offsets or []
        assert len(stream.offsets or []) == row_used
        if stop_index >= 0:
            break
    return Outcome("".join(texts), stop_index, used, tuple(offsets)), texts


def split(ids: list[int], cuts: list[int]) -> list[list[int]]:
    edges = [0, *sorted({c for c in cuts if c < len(ids)}), len(ids)]
    return [ids[a:b] for a, b in pairwise(edges)]


@examples(600)
@given(pieces=PIECES, options=OPTIONS, cuts=st.lists(st.integers(0, 60), max_size=60))
def test_every_split_gives_what_the_whole_text_gives(
    vocabulary: Vocabulary, pieces: list[str], options: Options, cuts: list[int]
) -> None:
    ids = vocabulary.tokenizer.encode("".join(pieces), add_special_tokens=False).ids
    expected = reference(vocabulary, ids, options)
    outcome, texts = stream_through(options.make(vocabulary), split(ids, cuts))
    assert outcome == expected
    sent = ""
    for text in texts:
        sent += text
        assert expected.text.startswith(sent)


@pytest.mark.parametrize("kind", ["byte_fallback", "metaspace", "word_piece"])
@examples(100)
@given(pieces=PIECES, options=OPTIONS)
def test_other_tokenizers_token_by_token(
    vocabularies: dict[str, Vocabulary], kind: str, pieces: list[str], options: Options
) -> None:
    vocabulary = vocabularies[kind]
    ids = vocabulary.tokenizer.encode("".join(pieces), add_special_tokens=False).ids
    expected = reference(vocabulary, ids, replace(options, min_tokens=0))
    outcome, _ = stream_through(replace(options, min_tokens=0).make(vocabulary), [[i] for i in ids] or [[]])
    assert outcome == expected


@examples(400)
@given(pieces=PIECES, options=OPTIONS, at=st.integers(0, 60), lost=st.integers(0, 10))
def test_a_resumed_text_is_the_text(
    vocabulary: Vocabulary, pieces: list[str], options: Options, at: int, lost: int
) -> None:
    """The first stream dies after some rows, the last of whose text may have been lost on the way."""
    ids = vocabulary.tokenizer.encode("".join(pieces), add_special_tokens=False).ids
    expected = reference(vocabulary, ids, options)
    at = min(at, len(ids))
    first, sent = options.make(vocabulary), ""
    for i in ids[:at]:
        text, stop_index, _ = first.advance([i], FINISH_NONE)
        sent += text
        if stop_index >= 0:
            return
    sent = sent[: max(0, len(sent) - lost)]
    second = options.make(vocabulary)
    second.resume(ids[:at], len(sent))
    outcome, _ = stream_through(second, split(ids[at:], list(range(60))))
    assert sent + outcome.text == expected.text
    assert (outcome.stop_index, at + outcome.used) == (expected.stop_index, expected.used)
    assert outcome.offsets == expected.offsets[at:]


@examples(200)
@given(pieces=PIECES, options=OPTIONS)
def test_nothing_is_held_back_without_need(vocabulary: Vocabulary, pieces: list[str], options: Options) -> None:
    ids = vocabulary.tokenizer.encode("".join(pieces), add_special_tokens=False).ids
    stream, sent, decoded = options.make(vocabulary), "", ""
    plain = vocabulary.decoder(skip_special_tokens=options.skip_special, spaces_between_special_tokens=True)
    for i in ids:
        text, stop_index, _ = stream.advance([i], FINISH_NONE)
        sent, decoded = sent + text, decoded + plain.feed(i)
        if stop_index >= 0:
            return
        may_match = [n for stop in options.stop for n in range(1, len(stop)) if decoded.endswith(stop[:n])]
        assert len(decoded) - len(sent) == max(may_match, default=0)


def ids_of(vocabulary: Vocabulary, text: str) -> list[int]:
    ids: list[int] = vocabulary.tokenizer.encode(text, add_special_tokens=False).ids
    return ids


@pytest.mark.parametrize("skip", [True, False])
def test_the_token_that_stopped_is_not_shown(vocabulary: Vocabulary, skip: bool) -> None:
    hello, turn_end = ids_of(vocabulary, "hello"), 4
    hidden = frozenset({turn_end})
    shown = "hello" if skip else "hello<|im_end|>"
    for options, finish, text in (
        (Options(skip_special=skip), FINISH_STOP, "hello"),
        (Options(skip_special=skip, include=True), FINISH_STOP, shown),
        (Options(skip_special=skip), LENGTH, shown),  # the engine went on past it: it is output like any other
    ):
        stream = options.make(vocabulary, hidden)
        assert stream.advance([*hello, turn_end], finish) == (text, -1, len(hello) + 1)
        assert stream.offsets is not None
        assert (len(stream.offsets), stream.offsets[-1]) == (len(hello) + 1, len(text))


def test_a_plain_stop_token_is_not_shown_either(vocabulary: Vocabulary) -> None:
    *ids, last = ids_of(vocabulary, "the dog")
    stream = Options().make(vocabulary, frozenset({last}))
    assert "the dog".startswith(stream.advance([*ids, last], FINISH_STOP)[0])
    stream = Options().make(vocabulary, frozenset({last}))
    assert stream.advance([*ids, last], LENGTH)[0] == "the dog"


def test_a_finish_without_tokens_flushes(vocabulary: Vocabulary) -> None:
    stream = Options(stop=("dogma",)).make(vocabulary)
    text, _, used = stream.advance(ids_of(vocabulary, "the dog"), FINISH_NONE)
    assert (text, used) == ("the ", len(ids_of(vocabulary, "the dog")))
    assert stream.advance([], LENGTH) == ("dog", -1, 0)


def test_an_incomplete_character_at_the_end(vocabulary: Vocabulary) -> None:
    emoji = [folders.token_id(vocabulary, c) for c in "ðŁĺĢ"]
    stream = Options().make(vocabulary)
    assert stream.advance(emoji[:3], FINISH_NONE) == ("", -1, 3)
    assert stream.advance([], LENGTH) == ("\ufffd", -1, 0)
    stream = Options(stop=("\ufffd",)).make(vocabulary)
    assert stream.advance(emoji[:3], LENGTH) == ("", 0, 3)


def test_a_match_among_the_prior_tokens_is_told_with_the_first_row(vocabulary: Vocabulary) -> None:
    """They came to the dead tokenizer but no answer came back."""
    stream = Options(stop=("END",)).make(vocabulary)
    stream.resume(ids_of(vocabulary, "hello END of"), 3)
    assert stream.advance(ids_of(vocabulary, " it"), FINISH_NONE) == ("lo ", 0, 0)
    assert stream.offsets == []


def test_more_sent_than_there_is(vocabulary: Vocabulary) -> None:
    with pytest.raises(InvalidArgument, match="RESUME_MISMATCH"):
        Options().make(vocabulary).resume(ids_of(vocabulary, "hello"), 6)
