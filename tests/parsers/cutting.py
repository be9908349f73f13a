"""Parses a golden stream token by token, in other pieces and with resumptions, and asserts that all results are one."""

from __future__ import annotations

import itertools
import json
import random
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Tokenizer

from quire_common.finish import PartKind
from quire_tokenizer.detokenize.text_stream import FINISH_STOP, StopRules, TextStream
from quire_tokenizer.model_folder import read_model_folder
from quire_tokenizer.output_parsing.parts import Part
from quire_tokenizer.vocabulary import Vocabulary
from tests.parsers.golden import ALL_WRITERS, REASONING, Stream, Writer, golden_stream
from tests.unit.tokenizer import folders
from tests.unit.tokenizer.chat.test_output_parsing import merged

_TRAINED_ON, _VOCABULARY = range(10_000, 10_020), 600
# Markers of these forms are tokens in real vocabularies; others are text.
_TOKEN = re.compile(r"<[^=\s]+>|\[[A-Z_/]+\]")
_FIRST_PIECE = 1 << 24


@dataclass(frozen=True)
class Parsed:
    """The text of an answer without markers, and its parts."""

    text: str
    parts: list[Part]

    def of(self, kind: PartKind, call: int | None = None) -> str:
        """All text of this kind and, if it is given, of this call."""
        ends = list(itertools.accumulate(part.chars for part in self.parts))
        return "".join(
            self.text[end - part.chars : end]
            for part, end in zip(self.parts, ends, strict=True)
            if part.kind == kind.value and call in (None, part.call)
        )

    @property
    def names(self) -> list[str]:
        """The names of the calls."""
        return [self.of(PartKind.TOOL_NAME, call) for call in sorted({p.call for p in self.parts if p.call >= 0})]

    def after(self, chars: int) -> Parsed:
        """Return the part of the stream behind these characters."""
        rest, parts = chars, []
        for part in self.parts:
            left = max(0, part.chars - rest)
            rest -= part.chars - left
            if left:
                parts.append(part._replace(chars=left))
        return Parsed(self.text[chars:], parts)


class _Pieces:
    """A decoder of pieces of text. Markers that are tokens have their ids."""

    def __init__(self, pieces: dict[int, str]) -> None:
        self._pieces = pieces

    def feed(self, token_id: int) -> str:
        return self._pieces[token_id]

    def flush(self) -> str:
        return ""


def train(path: Path) -> Path:
    """Write a model folder whose tokenizer was trained on golden streams of other seeds."""
    folder = folders.write_folder(path)
    corpus = [golden_stream(writer, seed).text for writer in ALL_WRITERS for seed in _TRAINED_ON]
    tokenizer = folders.byte_level(corpus, _VOCABULARY, added=())
    (folder / "tokenizer.json").write_text(tokenizer.to_str())
    return folder


def vocabulary(folder: Path, writer: Writer, *, tokens: bool) -> Vocabulary:
    """Read the model with a writer's parsers. `tokens`: whether the vocabulary has its markers."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    if tokens:
        markers = [marker for marker in sorted(writer.markers) if _TOKEN.fullmatch(marker)]
        tokenizer.add_tokens([AddedToken(marker, special=marker.startswith("<|")) for marker in markers])
    made = folders.write_folder(folder.parent / f"{folder.name}-{writer.render.__name__}-{tokens}")
    (made / "tokenizer.json").write_text(tokenizer.to_str())
    return Vocabulary(
        read_model_folder(str(made)), tool_parser=writer.family, reasoning_parser=REASONING[writer.family]
    )


def check(stream: Stream, vocabulary: Vocabulary, chance: random.Random) -> Counter[str]:
    """Assert that an answer has one result, the expected one: token by token, cut at every boundary of tokens and every
    pair of them, letter by letter, and resumed with every number of characters sent. Return how much was tried."""
    ids = vocabulary.tokenizer.encode(stream.text, add_special_tokens=False).ids
    whole, shown = _by_token(stream, vocabulary, ids)
    whole.text.encode()
    if stream.expected is not None:
        _as_expected(stream, whole)
    pieces = _pieces(vocabulary, ids)
    tried = Counter({"streams": 1, "tokens": len(ids), "characters": len(whole.text)})
    bounds = range(1, len(pieces))
    cuts: Iterable[tuple[int, ...]] = itertools.chain(
        [()], itertools.combinations(bounds, 1), itertools.combinations(bounds, 2)
    )
    for cut in cuts:
        found = _in_pieces(stream, vocabulary, _joined(pieces, cut))
        assert found == whole, (stream.text, [pieces[at] for at in cut])
        tried["cuts"] += 1
    letters = [(token, each) for token, text in pieces for each in ([text] if token >= 0 else text)]
    assert _in_pieces(stream, vocabulary, letters) == whole, stream.text
    for chars in range(len(whole.text) + 1):
        first = next((at for at, count in enumerate(shown) if count >= chars), None)
        if first is None:
            break  # text that only the end of the answer brings
        seen = chance.randint(first, len(ids)) if chars % 2 else first
        resumed = _resumed(stream, vocabulary, ids[:seen], ids[seen:], chars)
        assert resumed == whole.after(chars), (stream.text, seen, chars)
        tried["resumptions"] += 1
    return tried


def _as_expected(stream: Stream, found: Parsed) -> None:
    """Compare with what the stream was made of. A stream that is cut off has the beginning of it."""
    expected, names = stream.expected, found.names
    assert expected is not None
    texts = [found.of(PartKind.TOOL_ARGUMENTS, call) for call in range(len(names))]
    if stream.cut_off:
        for (name, arguments), called, text in zip(expected.calls, names[:-1], texts, strict=False):
            assert (called, json.loads(text)) == (name, arguments), stream.text
        return
    calls = [(name, json.loads(text)) for name, text in zip(names, texts, strict=True)]
    assert calls == expected.calls, stream.text
    assert found.of(PartKind.CONTENT) == expected.content, stream.text
    assert found.of(PartKind.REASONING) == expected.reasoning, stream.text


def _by_token(stream: Stream, vocabulary: Vocabulary, ids: Sequence[int]) -> tuple[Parsed, list[int]]:
    """Return the result, and the number of characters that came before each token and after the last."""
    decoder = _text_stream(stream, vocabulary)
    text, shown = "", [0]
    for token in ids:
        text += decoder.advance([token], 0)[0]
        shown.append(len(text))
    text += decoder.advance([], FINISH_STOP)[0]
    return Parsed(text, merged(decoder.take_parts(len(text)))), shown


def _resumed(
    stream: Stream, vocabulary: Vocabulary, prior: Sequence[int], rest: Sequence[int], chars_sent: int
) -> Parsed:
    decoder = _text_stream(stream, vocabulary)
    decoder.resume(prior, chars_sent)
    text = decoder.advance(rest, FINISH_STOP)[0]
    return Parsed(text, merged(decoder.take_parts(len(text))))


def _text_stream(stream: Stream, vocabulary: Vocabulary) -> TextStream:
    decoder = vocabulary.decoder(skip_special_tokens=True, spaces_between_special_tokens=True, parsing=stream.options)
    return TextStream(decoder, StopRules())


def _pieces(vocabulary: Vocabulary, ids: Sequence[int]) -> list[tuple[int, str]]:
    """Return the texts of the tokens, each with the id of the marker that it is, or -1. Tokens that end within a
    character have no text."""
    plain = vocabulary.decoder(skip_special_tokens=False, spaces_between_special_tokens=True)
    added = set(vocabulary.added.values())
    found = [(token if token in added else -1, plain.feed(token)) for token in ids]
    return [piece for piece in (*found, (-1, plain.flush())) if piece[1]]


def _joined(pieces: Sequence[tuple[int, str]], cuts: Sequence[int]) -> list[tuple[int, str]]:
    """Join the pieces between cuts. Markers that are tokens stay alone."""
    joined: list[tuple[int, str]] = []
    for start, end in itertools.pairwise((0, *cuts, len(pieces))):
        for is_marker, run in itertools.groupby(pieces[start:end], lambda piece: piece[0] >= 0):
            found = list(run)
            joined += found if is_marker else [(-1, "".join(text for _, text in found))]
    return joined


def _in_pieces(stream: Stream, vocabulary: Vocabulary, pieces: Sequence[tuple[int, str]]) -> Parsed:
    ids = [token if token >= 0 else _FIRST_PIECE + at for at, (token, _) in enumerate(pieces)]
    texts = dict(zip(ids, (text for _, text in pieces), strict=True))
    decoder = vocabulary.parsers.wrap(_Pieces(texts), stream.options)
    text = "".join([*map(decoder.feed, ids), decoder.flush()])
    return Parsed(text, merged(decoder.take_parts(len(text))))
