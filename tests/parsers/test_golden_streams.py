"""Golden streams of each family: however an answer is cut and resumed, a client gets the same. `make parsers`."""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from quire_tokenizer.detokenize.text_stream import TextStream
from quire_tokenizer.output_parsing.json_calls import JsonToolParser
from quire_tokenizer.output_parsing.json_values import ValueScanner
from quire_tokenizer.output_parsing.marker_finder import MarkerFinder, TextMarkers
from quire_tokenizer.output_parsing.parsed_decoder import ParsedDecoder
from quire_tokenizer.output_parsing.special_token_calls import SpecialTokenToolParser
from quire_tokenizer.output_parsing.whitespace import TrimmedWriter
from quire_tokenizer.output_parsing.xml_calls import XmlToolParser
from quire_tokenizer.vocabulary import Vocabulary
from tests.parsers.cutting import check, train, vocabulary
from tests.parsers.golden import ALL_WRITERS, REASONING, Writer, golden_stream

STREAMS = int(os.environ.get("QUIRE_GOLDEN_STREAMS", "200"))
QUICK_FROM, QUICK = 2, 2
WANTED_US = 3.0
# A machine that is busy must not fail the suite; work that is not linear must.
MOST_US = 30.0
MUTATION_STREAMS = 100
_BY_NAME = {writer.name: writer for writer in ALL_WRITERS}
_each_writer = pytest.mark.parametrize("writer", [pytest.param(writer, id=writer.name) for writer in ALL_WRITERS])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("golden") / "model")


@pytest.fixture(scope="module")
def rows() -> Iterator[list[str]]:
    """The table, which is printed at the end."""
    found: list[str] = []
    yield found
    head = ("parser", "reasoning", "streams", "tokens", "cuts", "resumed", "us/token", "of it parsing")
    print("\n\n" + _row(*head), *found, sep="\n")


def _row(*cells: object) -> str:
    return "| " + " | ".join(f"{cell!s:<{28 if at == 0 else 13}}" for at, cell in enumerate(cells)) + " |"


def _vocabularies(folder: Path, writer: Writer) -> tuple[Vocabulary, Vocabulary]:
    """Two vocabularies, without and with the family's markers as tokens."""
    return vocabulary(folder, writer, tokens=False), vocabulary(folder, writer, tokens=True)


def _try_streams(folder: Path, writer: Writer, seeds: range) -> Counter[str]:
    """Check streams, which take the two vocabularies in turn."""
    pair, tried = _vocabularies(folder, writer), Counter[str]()
    for seed in seeds:
        tried += check(golden_stream(writer, seed), pair[seed % 2], random.Random(seed))
    return tried


def _us_per_token(folder: Path, writer: Writer) -> tuple[float, float]:
    """Time to turn a token of a well-formed stream into text and parts, and the share of parsing."""
    pair = _vocabularies(folder, writer)
    streams = [(golden_stream(writer, seed), pair[seed % 2]) for seed in range(STREAMS) if seed % 5 < 3]
    encoded = [(s, v, v.tokenizer.encode(s.text, add_special_tokens=False).ids) for s, v in streams]

    def seconds(*, parsed: bool) -> float:
        decoders = [
            (
                v.decoder(
                    skip_special_tokens=True,
                    spaces_between_special_tokens=True,
                    parsing=s.options if parsed else None,
                ),
                ids,
            )
            for s, v, ids in encoded
        ]
        started = time.process_time()
        for decoder, ids in decoders:
            for token in ids:
                text = decoder.feed(token)
                if text and isinstance(decoder, ParsedDecoder):
                    decoder.take_parts(len(text))
        return time.process_time() - started

    tokens = sum(len(ids) for _, _, ids in encoded)
    whole, plain = (min(seconds(parsed=parsed) for _ in range(5)) / tokens * 1e6 for parsed in (True, False))
    return whole, whole - plain


@_each_writer
def test_some_streams_have_one_result_wherever_they_are_cut(folder: Path, writer: Writer) -> None:
    assert _try_streams(folder, writer, range(QUICK_FROM, QUICK_FROM + QUICK))["cuts"] > 0


@pytest.mark.slow
@_each_writer
def test_golden_streams_have_one_result_wherever_they_are_cut(folder: Path, writer: Writer, rows: list[str]) -> None:
    tried = _try_streams(folder, writer, range(STREAMS))
    whole, parsing = _us_per_token(folder, writer)
    counts = [f"{tried[key]:,}" for key in ("streams", "tokens", "cuts", "resumptions")]
    over = "" if parsing < WANTED_US else f" (wanted < {WANTED_US:g})"
    rows.append(_row(writer.name, REASONING[writer.family], *counts, f"{whole:.2f}", f"{parsing:.2f}{over}"))
    assert tried["streams"] == STREAMS
    assert parsing < MOST_US


def _forget_held_text(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TextMarkers, "held", lambda self, text: 0)


def _lose_held_text(patch: pytest.MonkeyPatch) -> None:
    take_held = MarkerFinder._take_held
    patch.setattr(MarkerFinder, "_take_held", lambda self: take_held(self)[:0])


def _forget_an_escape_between_pieces(patch: pytest.MonkeyPatch) -> None:
    feed = ValueScanner.feed

    def forgetful(self: ValueScanner, text: str, at: int) -> int:
        end = feed(self, text, at)
        self._escaped = False
        return end

    patch.setattr(ValueScanner, "feed", forgetful)


def _forget_white_space_between_pieces(patch: pytest.MonkeyPatch) -> None:
    write = TrimmedWriter.write

    def forgetful(self: TrimmedWriter, text: str) -> None:
        write(self, text)
        self.release()

    patch.setattr(TrimmedWriter, "write", forgetful)


def _forget_the_end_of_a_name(patch: pytest.MonkeyPatch) -> None:
    in_name = XmlToolParser._in_name

    def forgetful(self: XmlToolParser, text: str) -> None:
        in_name(self, text)
        self._held = self._held.rstrip('">\n')

    patch.setattr(XmlToolParser, "_in_name", forgetful)


def _write_the_fence_of_arguments(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SpecialTokenToolParser, "_in_arguments", lambda self, text: self._write(text))


def _raise_on_junk(patch: pytest.MonkeyPatch) -> None:
    give_up = JsonToolParser._give_up

    def strict(self: JsonToolParser, end_marker: str = "") -> None:
        if self._call is not None and not self._call.named:
            raise AssertionError("not a call")
        give_up(self, end_marker)

    patch.setattr(JsonToolParser, "_give_up", strict)


def _keep_parts_that_were_sent(patch: pytest.MonkeyPatch) -> None:
    take_parts, replay = ParsedDecoder.take_parts, TextStream.replay

    def forgetful(self: TextStream, prior_ids: list[int]) -> None:
        patch.setattr(ParsedDecoder, "take_parts", lambda decoder, chars: [])
        replay(self, prior_ids)
        patch.setattr(ParsedDecoder, "take_parts", take_parts)

    patch.setattr(TextStream, "replay", forgetful)


def _send_one_character_twice(patch: pytest.MonkeyPatch) -> None:
    begin_replay = TextStream.begin_replay
    patch.setattr(TextStream, "begin_replay", lambda self, chars: begin_replay(self, max(0, chars - 1)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "break_parser"),
    [
        ("hermes", _forget_held_text),
        ("deepseek_v31", _forget_held_text),
        ("granite", _lose_held_text),
        ("hermes", _forget_an_escape_between_pieces),
        ("glm45", _forget_white_space_between_pieces),
        ("minimax_m2", _forget_the_end_of_a_name),
        ("deepseek_v3", _write_the_fence_of_arguments),
        ("hermes", _raise_on_junk),
        ("kimi_k2", _keep_parts_that_were_sent),
        ("pythonic", _send_one_character_twice),
    ],
)
def test_the_suite_finds_a_parser_that_is_broken(
    folder: Path, name: str, break_parser: Callable[[pytest.MonkeyPatch], None]
) -> None:
    writer, seeds = _BY_NAME[name], range(MUTATION_STREAMS)
    with pytest.MonkeyPatch.context() as patch:
        break_parser(patch)
        with pytest.raises((AssertionError, ValueError, IndexError)):
            _try_streams(folder, writer, seeds)
