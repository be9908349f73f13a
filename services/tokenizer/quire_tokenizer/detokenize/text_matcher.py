"""Finds the places where any of many texts occurs in another text. The leftmost match wins, then the longest, as when
the tokenizers library matches added tokens.

A plain regular expression with hundreds of alternatives tries each of them at many positions, and blocks all other
threads meanwhile. This matcher tries common beginnings only once, and searches a text in pieces. This module knows
nothing of tokens.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

Span = tuple[int, int]
# A search of so many characters holds up other threads for some milliseconds.
_PIECE_CHARS = 65_536


class TextMatcher:
    """Matches a set of texts. Thread-safe, because nothing changes after construction. `texts` may be empty, but it
    must not contain an empty text."""

    def __init__(self, texts: Collection[str]) -> None:
        self._pattern = re.compile(_any_of(set(texts)) if texts else r"(?!)")
        self._longest = max(map(len, texts), default=0)

    def spans(self, text: str) -> Iterator[Span]:
        """Yield begin and end of each match, in order: the leftmost, and of those the longest. Matches do not overlap.
        The text is searched in pieces, so that other threads can run in between."""
        at = 0
        while at < len(text):
            end = at + _PIECE_CHARS
            for match in self._pattern.finditer(text, at, end + self._longest):
                if match.start() >= end:
                    break
                at = match.end()
                yield match.span()
            at = max(at, end)

    def is_in(self, text: str) -> bool:
        """Whether any of the texts occurs in `text`."""
        return next(self.spans(text), None) is not None


def _any_of(texts: set[str]) -> str:
    """Return a regular expression for any of the texts, which prefers the longest. Texts with the same beginning share
    it, as in a prefix tree, so that a search looks at each character once. An empty text makes the expression
    optional."""
    by_head: dict[str, set[str]] = {}
    for text in texts - {""}:
        by_head.setdefault(text[0], set()).add(text)
    branches = []
    for _head, group in sorted(by_head.items()):
        first, last = min(group), max(group)
        parts = (at for at, (one, other) in enumerate(zip(first, last, strict=False)) if one != other)
        common = first[: next(parts, min(len(first), len(last)))]
        branches.append(re.escape(common) + _any_of({text[len(common) :] for text in group}))
    if not branches:
        return ""
    return f"(?:{'|'.join(branches)}){'?' if '' in texts else ''}"
