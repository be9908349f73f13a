"""Decides which special tokens in a rendered conversation the template wrote, and which are text that a user wrote.

Most special tokens contain some punctuation, such as the bar of <|im_end|>. Before rendering, such characters in the
user's strings are replaced by symbols that occur nowhere else; this is the disguise. If the result contains the text of
a special token, its punctuation can only come from the template. The template may join, cut or replace parts, but it
cannot turn disguised text into a special token. Each character is replaced by one symbol, so positions stay the same
when the disguise is taken off. A special token without such punctuation counts only if the template's source contains
its text; a user may then write it too.

A template may test for the disguised characters, and then render another text. To notice this, the plain and the
disguised rendering are compared. This module knows nothing of processes, tokenizers or messages.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from quire_common.errors import InvalidArgument
from quire_tokenizer.chat.stand_ins import BLOCK, FIRST, LAST
from quire_tokenizer.detokenize.text_matcher import TextMatcher

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from quire_tokenizer.detokenize.text_matcher import Span

# Where special tokens leave a choice, take what chat templates are least likely to look for in a message.
_PREFERRED = "|｜▁[]<>"
# Part of names in templates' data, such as tool_calls, or of JSON.
_AVOIDED = frozenset("_-.:,;\"'{}")


_PIECE_CHARS = 65_536


@dataclass(frozen=True)
class Rendering:
    """A conversation as text, and where the template's special tokens are in it, in order."""

    text: str
    specials: tuple[Span, ...]


@dataclass(frozen=True)
class Disguise:
    """The characters that are replaced in one request, and the symbols that replace them."""

    to_symbol: dict[int, int]
    to_plain: dict[int, int]

    def put_on(self, value: Any) -> Any:
        """Return a copy of JSON-like data in which `to_symbol` replaces characters in all strings and keys, so that no
        string contains a special token with punctuation any more."""
        if isinstance(value, str):
            return _translated(value, self.to_symbol)
        if isinstance(value, list):
            return [self.put_on(item) for item in value]
        if isinstance(value, dict):
            return {self.put_on(key): self.put_on(item) for key, item in value.items()}
        return value


class Provenance:
    """Makes and checks disguises. One object is made for a vocabulary's special tokens and a template's source."""

    def __init__(self, specials: Collection[str], template: str) -> None:
        guarded = frozenset(s for s in specials if _punctuation(s))
        # Without punctuation there is nothing to disguise; such a token is special only where the template names it.
        named = frozenset(s for s in specials if s and s not in guarded and s in template)
        self._special = _matcher_of(guarded | named)
        self._characters = _choose_characters(guarded)

    def disguise_for(self, values: Any) -> Disguise | None:
        """Choose a disguise for the user's data: each character that guards special tokens and occurs in the data gets
        a symbol that does not occur there. Returns None if the data, keys included, has no such character, so that no
        part of it could become a special token with punctuation. Raises InvalidArgument if the data uses symbols of
        every block."""
        text = "\0".join(strings_of(values))
        present = [c for c in self._characters if c in text]
        if not present:
            return None
        size = max(BLOCK, len(present))
        for start in range(FIRST, LAST - size, size):
            block = range(start, start + len(present))
            if not any(chr(c) in text for c in block):
                to_symbol = {ord(c): symbol for c, symbol in zip(present, block, strict=True)}
                return Disguise(to_symbol, {symbol: plain for plain, symbol in to_symbol.items()})
        raise InvalidArgument(
            "TOO_MANY_SYMBOLS",
            "The conversation uses symbols of every part of Unicode's SignWriting, which the service needs itself.",
            "Remove some.",
            param="messages",
        )

    def undisguised(self, text: str) -> Rendering:
        """Return the rendering of a text whose user data needed no disguise. The template wrote all special tokens with
        punctuation in it."""
        return Rendering(text, self._spans(text))

    def reconcile(self, plain: str, disguised: str, disguise: Disguise, values: Any) -> Rendering:
        """Choose between the rendering of the plain user data and that of the disguised data. Returns the plain text if
        both agree without the disguise, or if they have the same special tokens and the user wrote none. Otherwise
        returns the disguised text, with the disguise taken off."""
        spans = self._spans(disguised)
        revealed = _translated(disguised, disguise.to_plain)
        if revealed == plain:
            return Rendering(plain, spans)
        # The template looked at disguised characters. Its true text is right if it holds the same special tokens and
        # the user wrote none; otherwise who wrote what is unsure there, and the disguised rendering is the safe one.
        user_wrote_one = any(self._special.is_in(s) for s in strings_of(values))
        plain_spans = self._spans(plain)
        if not user_wrote_one and _texts(plain, plain_spans) == _texts(disguised, spans):
            return Rendering(plain, plain_spans)
        return Rendering(revealed, spans)

    def _spans(self, text: str) -> tuple[Span, ...]:
        return tuple(self._special.spans(text))


def strings_of(value: Any) -> Iterator[str]:
    """Yield all strings within JSON-like data, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from strings_of(item)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from strings_of(item)


def _choose_characters(specials: Collection[str]) -> tuple[str, ...]:
    """Choose few punctuation characters, of which every special token (all must have some) has at least one. Takes,
    again and again, the character that most of the remaining tokens have; of equals, the first in _PREFERRED."""
    left, chosen = set(specials), list[str]()
    while left:
        candidates = sorted({c for s in left for c in _punctuation(s)})
        best = max(
            candidates, key=lambda c: (sum(c in s for s in left), -_PREFERRED.find(c) if c in _PREFERRED else -99)
        )
        chosen.append(best)
        left = {s for s in left if best not in s}
    return tuple(chosen)


def _punctuation(special: str) -> set[str]:
    return {c for c in special if not c.isalnum() and not c.isspace() and c not in _AVOIDED}


@lru_cache(maxsize=8)
def _matcher_of(texts: frozenset[str]) -> TextMatcher:
    return TextMatcher(texts)


def _translated(text: str, symbols: dict[int, int]) -> str:
    """Replace characters of the text by their symbols. Works in pieces, so that other threads can run in between."""
    pieces = (text[at : at + _PIECE_CHARS] for at in range(0, len(text), _PIECE_CHARS))
    return "".join(piece.translate(symbols) for piece in pieces)


def _texts(text: str, spans: tuple[Span, ...]) -> list[str]:
    return [text[start:end] for start, end in spans]
