"""Cuts a long text into pieces whose tokens are exactly the tokens of the whole text.

The patterns of GPT-2, Llama 3 and Qwen begin a new word between a letter or a digit and a space or a full stop,
whatever comes before and after. No token contains parts of two words. Other tokenizers do not promise this, so their
texts are not cut.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from quire_common.errors import TooLarge

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from tokenizers import AddedToken

# A piece of so many characters is encoded in some 100 ms, and takes some 10 MiB while it is.
PIECE_CHARS = 65_536
# Without a place to cut: such a text is refused, for it takes as many bytes a token in one piece.
_MOST_CHARS = 524_288
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_KNOWN = frozenset(_WORDS % digits for digits in (r"\p{N}", r"\p{N}{1,3}"))
# No normalizer that is allowed here joins the one with the other.
_LETTERS = "0-9A-Za-z\u0410-\u044f\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fff\uac00-\ud7a3"
_CUT = re.compile(f'[{_LETTERS}][ \t\r\n,.;:!?)"/+=\u3001\u3002\uff0c]')


def may_cut(
    pre_tokenizers: Sequence[dict[str, Any]], normalizers: Sequence[dict[str, Any]], added: Iterable[AddedToken]
) -> bool:
    """Whether texts of this tokenizer may be cut, judging by its steps. It must find words as GPT-2, Llama 3 or Qwen
    do, without a space added before the text, and have no normalizer but NFC. No added token may strip white space, be
    a single word only, or extend over a cut."""
    if any(step["type"] != "NFC" for step in normalizers):
        return False
    # Such a token may reach over a cut, or looks at its neighbours.
    if any(token.lstrip or token.rstrip or token.single_word or _CUT.search(token.content) for token in added):
        return False
    last = pre_tokenizers[-1] if pre_tokenizers else {}
    if last.get("type") != "ByteLevel" or last.get("add_prefix_space", True):
        return False
    if len(pre_tokenizers) == 1:
        return bool(last.get("use_regex"))
    return len(pre_tokenizers) == 2 and not last.get("use_regex") and _is_known(pre_tokenizers[0])


def pieces(text: str) -> Iterator[tuple[int, int]]:
    """Yield begin and end (exclusive) of each piece. A piece has more than PIECE_CHARS characters, up to the next
    possible cut after them or the end of the text; the last piece may be shorter. Raises TEXT_TOO_LARGE if a piece
    would have more than _MOST_CHARS characters."""
    start = 0
    while start < len(text):
        cut = _CUT.search(text, start + PIECE_CHARS)
        end = cut.start() + 1 if cut is not None else len(text)
        if end - start > _MOST_CHARS:
            raise _no_words(end - start)
        yield start, end
        start = end


def _is_known(step: dict[str, Any]) -> bool:
    isolates = step.get("behavior") == "Isolated" and not step.get("invert")
    return step["type"] == "Split" and isolates and step.get("pattern", {}).get("Regex") in _KNOWN


def _no_words(chars: int) -> TooLarge:
    """Return the error for a text without a possible cut over too many characters."""
    return TooLarge(
        "TEXT_TOO_LARGE",
        f"The text has {chars} characters without the end of a word; at most {_MOST_CHARS} are accepted.",
        "Send less of it, or put spaces into it.",
    )
