"""Which special tokens in a rendered conversation are the template's own, and which are text that a user wrote.

Every special token has some punctuation in it, such as the bar of <|im_end|>. Before rendering, such characters in the
user's strings are disguised as symbols that occur nowhere else; what then reads as a special token in the result owes
those characters to the template. Nothing the template does (joining parts, cutting, replacing) can turn
disguised text into a special token. The disguise is one character for one, so taking it off leaves positions in place.

A template may look at the disguised characters and render something else than it would have. That shows when both
renderings are compared. Knows nothing of processes, tokenizers or messages.
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
    """One request's substitution of characters."""

    to_symbol: dict[int, int]
    to_plain: dict[int, int]

    def put_on(self, value: Any) -> Any:
        """Return a copy of JSON-like data in which the characters of `to_symbol` are replaced in all strings, keys
        included, so that no string reads as a special token any more."""
        if isinstance(value, str):
            return _translated(value, self.to_symbol)
        if isinstance(value, list):
            return [self.put_on(item) for item in value]
        if isinstance(value, dict):
            return {self.put_on(key): self.put_on(item) for key, item in value.items()}
        return value


class Provenance:
    """Made once for a vocabulary's special tokens and a template's source."""

    def __init__(self, specials: Collection[str], template: str) -> None:
        guarded = frozenset(s for s in specials if _punctuation(s))
        # Without punctuation there is nothing to disguise; such a token is special only where the template names it.
        named = frozenset(s for s in specials if s and s not in guarded and s in template)
        self._special = _matcher_of(guarded | named)
        self._characters = _choose_characters(guarded)

    def disguise_for(self, values: Any) -> Disguise | None:
        """Choose how to disguise the user's data; None where nothing in it could become a special token. Raises
        InvalidArgument where the data itself uses all symbols."""
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
        """A rendering whose user data held nothing to disguise: all special tokens are the template's."""
        return Rendering(text, self._spans(text))

    def reconcile(self, plain: str, disguised: str, disguise: Disguise, values: Any) -> Rendering:
        """Choose between the texts that the template made of the user's data as it is and in disguise. The plain one is
        taken if its special tokens are surely the template's, else the disguised one, with the disguise taken off."""
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
    """Choose few characters, of which every special token has at least one."""
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
    """In pieces, between which other threads have their turn."""
    pieces = (text[at : at + _PIECE_CHARS] for at in range(0, len(text), _PIECE_CHARS))
    return "".join(piece.translate(symbols) for piece in pieces)


def _texts(text: str, spans: tuple[Span, ...]) -> list[str]:
    return [text[start:end] for start, end in spans]
