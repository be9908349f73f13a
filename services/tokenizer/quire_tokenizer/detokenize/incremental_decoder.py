"""Decodes tokens to whole characters, one token at a time. The text so far is always a prefix of the whole text.

`TableDecoder` looks pieces up and joins characters that span tokens. `WindowDecoder` decodes a short window with the
library, for tokenizers whose decoder looks further than one token. Neither knows of stop strings or requests.
"""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tokenizers import Tokenizer

    from quire_tokenizer.detokenize.token_pieces import TokenPieces

REPLACEMENT = "\ufffd"
_EACH_BYTE = "quire.replace_each_byte"
_NO_TOKENS: frozenset[int] = frozenset()
# A character spans a handful of tokens; this many that end in U+FFFD are no beginning of one. Keeps the window short.
_MAX_UNREAD = 64


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    """Handle an error of a codec: replace each byte that cannot be decoded by U+FFFD. Returns the replacement and the
    position at which to go on. Raises the error itself if it is one of encoding."""
    if not isinstance(error, UnicodeDecodeError):
        raise error
    return REPLACEMENT * (error.end - error.start), error.end


codecs.register_error(_EACH_BYTE, _replace_each_byte)


class TextDecoder(Protocol):
    """Decodes the tokens of one sequence to text. Not safe for use by two threads at once.

    The joined results of `feed` and a last `flush` are the text. Ids must not be negative. Ids beyond the vocabulary
    and skipped special tokens add no text.
    """

    def feed(self, token_id: int) -> str:
        """Return the characters that this token completes; they may be none."""

    def flush(self) -> str:
        """Return the rest of the text at the end: U+FFFD for bytes that form no character."""


class TableDecoder:
    """Decodes with a table of each token's text or bytes. Bytes of an incomplete UTF-8 character wait until it is
    complete."""

    __slots__ = ("_errors", "_first", "_last", "_pending", "_pieces", "_skip", "_started", "_strip", "_strip_start")

    def __init__(self, table: TokenPieces, skip: frozenset[int] = _NO_TOKENS) -> None:
        self._pieces = table.pieces
        self._last = len(table.pieces) - 1
        self._first = table.first_pieces
        self._skip = skip
        self._strip = table.strip_start
        self._errors = _EACH_BYTE if table.replace_each_byte else "replace"
        self._pending = b""
        # False while the next token is the text's first.
        self._started = not table.first_pieces and not table.strip_start

    def feed(self, token_id: int) -> str:
        """Return the characters that this token completes; bytes of an incomplete one are kept. Skipped tokens and ids
        beyond the vocabulary add no text."""
        if token_id in self._skip:
            return ""
        if token_id > self._last:
            token_id = self._last
        if not self._started:
            return self._feed_start(token_id)
        piece = self._pieces[token_id]
        if not self._pending:
            return piece if isinstance(piece, str) else self._join(piece)
        return self._join(piece.encode() if isinstance(piece, str) else piece)

    def flush(self) -> str:
        pending, self._pending = self._pending, b""
        return self._stripped(codecs.utf_8_decode(pending, self._errors, True)[0])

    def _feed_start(self, token_id: int) -> str:
        """Return the text of a token at the text's start, where its piece may be another one, and up to `strip_start`
        leading spaces are stripped. After an id beyond the vocabulary, the next token is still at the start."""
        if token_id == self._last:
            return ""
        piece = self._first.get(token_id, self._pieces[token_id])
        if self._first:
            self._started = True
        return self._stripped(self._join(piece.encode() if isinstance(piece, str) else piece))

    def _join(self, raw: bytes) -> str:
        """Decode the pending bytes and `raw`; return the whole characters. Bytes of an incomplete character at the end
        stay pending; bytes that are no UTF-8 become U+FFFD."""
        raw = self._pending + raw
        text, consumed = codecs.utf_8_decode(raw, self._errors, False)
        self._pending = raw[consumed:]
        return text

    def _stripped(self, text: str) -> str:
        """Remove up to `strip_start` spaces from the text's start; they may come from several tokens. The start is over
        when other text comes, or all these spaces are removed."""
        while self._strip and text.startswith(" "):
            text = text[1:]
            self._strip -= 1
        if text or not self._strip:
            self._strip = 0
            self._started = True
        return text


class WindowDecoder:
    """Decodes the tokens since the last break twice, with and without the new ones; the difference is new text.

    The window starts one break back, so that the decoder sees what precedes the new tokens.
    """

    __slots__ = ("_last_special", "_read", "_skip", "_spaces", "_specials", "_tokenizer", "_window")

    def __init__(
        self,
        tokenizer: Tokenizer,
        skip: frozenset[int] = _NO_TOKENS,
        specials: Mapping[int, str] | None = None,
        spaces_between_specials: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = skip
        self._specials = specials or {}
        self._spaces = spaces_between_specials
        self._window: list[int] = []
        self._read = 0
        self._last_special = False

    def feed(self, token_id: int) -> str:
        """Return the text that this token adds: none for a skipped token, or while a character is incomplete. Unless
        spaces are wanted, a special token right after another adds only its own text."""
        if token_id in self._skip:
            return ""
        self._window.append(token_id)
        text = self._advance(final=False)
        if not self._spaces:
            special = token_id in self._specials
            if special and self._last_special and text:
                text = self._specials[token_id]
            self._last_special = special
        return text

    def flush(self) -> str:
        return self._advance(final=True)

    def _advance(self, *, final: bool) -> str:
        """Return the text of the window less the text of its tokens that were read before, and move the window on to
        the new tokens. Returns nothing, and keeps the window, if the tokens add no text, or end in an incomplete
        character. Such a character is returned only if `final` or after 64 tokens. An id beyond the vocabulary that
        adds no text leaves the window at once, because the library decodes as if it were not there."""
        before = self._tokenizer.decode(self._window[: self._read], skip_special_tokens=False) if self._read else ""
        after = self._tokenizer.decode(self._window, skip_special_tokens=False)
        final = final or len(self._window) - self._read >= _MAX_UNREAD
        if len(after) <= len(before) or (after.endswith(REPLACEMENT) and not final):
            unread = len(self._window) > self._read
            if unread and after == before and self._tokenizer.id_to_token(self._window[-1]) is None:
                self._window.pop()
            return ""
        del self._window[: self._read]
        self._read = len(self._window)
        return after[len(before) :]
