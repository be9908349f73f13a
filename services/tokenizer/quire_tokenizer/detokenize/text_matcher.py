"""Where any of many texts stand in another: leftmost, then longest, as the tokenizers library matches added tokens.

An alternation of hundreds of texts tries each of them wherever one may begin, and holds up all other threads while it
does. Here common beginnings are tried once, and a text is searched in pieces. Knows nothing of tokens.
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
    """Thread-safe: nothing changes after construction. `texts` may be none, but none of them is empty."""

    def __init__(self, texts: Collection[str]) -> None:
        self._pattern = re.compile(_any_of(set(texts)) if texts else r"(?!)")
        self._longest = max(map(len, texts), default=0)

    def spans(self, text: str) -> Iterator[Span]:
        """Yield begin and end of each place where one of the texts stands, in order; they do not overlap."""
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
        """Whether any of them is."""
        return next(self.spans(text), None) is not None


def _any_of(texts: set[str]) -> str:
    """Return a regular expression for any of the texts that looks at each character once, and prefers the longest."""
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
