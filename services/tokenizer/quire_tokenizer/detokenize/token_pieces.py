"""The table of the piece that every token adds to a text. The table is made once, and makes streaming cheap.

Most decoders look at one token at a time, with two exceptions: characters whose UTF-8 bytes come from several tokens,
and spaces at the start of the text. For these decoders, a table with each token's text is sufficient. (It has bytes if
the token is not a whole number of characters.) `build_pieces` knows which decoders these are. For other decoders it
returns None, and the library decodes texts. This module knows nothing of streams.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quire_tokenizer.pipeline_steps import pipeline_steps

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tokenizers import Tokenizer

Piece = str | bytes
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True)
class TokenPieces:
    """The table of pieces, indexed by token id. It has one further, empty piece for ids beyond the vocabulary."""

    pieces: Sequence[Piece]
    # Bytes that are no UTF-8: one U+FFFD for each (byte fallback), or one for each broken character (byte level)?
    replace_each_byte: bool
    # Where the text's first token has another piece than elsewhere.
    first_pieces: Mapping[int, Piece]
    # Spaces to take away at the text's very start.
    strip_start: int


def build_pieces(tokenizer: Tokenizer, tokens: Mapping[int, str]) -> TokenPieces | None:
    """Make the table of this tokenizer, if its decoder is ByteLevel, Metaspace or SentencePiece's byte fallback.
    Returns None for a tokenizer without a decoder, and for any other decoder, which may look at more than one token at
    a time. `tokens` has the tokenizer's tokens by id."""
    steps = pipeline_steps(tokenizer.decoder)
    if not steps:
        return None
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return _table(tokens, byte_level_bytes, replace_each_byte=False)
    if kinds == ["Metaspace"]:
        return _metaspace(tokens, steps[0])
    return _byte_fallback(tokens, steps)


def byte_level_bytes(token: str) -> bytes:
    """Return the bytes of a byte-level token, which spells bytes as visible characters. If the token does not, return
    the bytes of its text."""
    try:
        return bytes(_BYTE_OF[c] for c in token)
    except KeyError:
        return token.encode()


def _metaspace(tokens: Mapping[int, str], step: Mapping[str, Any]) -> TokenPieces:
    """Make the table for a Metaspace decoder. Its mark stands for a space. In the text's first token, the mark stands
    for nothing, unless the decoder's prepend_scheme is "never"."""
    mark = step["replacement"]
    first: dict[int, Piece] = {}
    if step.get("prepend_scheme", "always") != "never":
        first = {i: token.replace(mark, "") for i, token in tokens.items() if mark in token}
    return _table(tokens, lambda t: t.replace(mark, " ").encode(), replace_each_byte=False, first=first)


def _byte_fallback(tokens: Mapping[int, str], steps: list[dict[str, Any]]) -> TokenPieces | None:
    """Make the table for SentencePiece's decoder: Replace steps, ByteFallback, Fuse, and optionally one Strip of spaces
    at the start of the text. Tokens such as <0x0A> are one byte each. Returns None if the steps are others."""
    steps = list(steps)
    replacements = []
    while steps and steps[0]["type"] == "Replace" and "String" in steps[0]["pattern"]:
        step = steps.pop(0)
        replacements.append((step["pattern"]["String"], step["content"]))
    kinds = [step["type"] for step in steps]
    if kinds not in (["ByteFallback", "Fuse"], ["ByteFallback", "Fuse", "Strip"]):
        return None
    strip: Mapping[str, Any] = steps[2] if len(steps) == 3 else {"content": " ", "start": 0, "stop": 0}
    if strip["stop"] != 0 or strip["content"] != " ":
        return None

    def token_bytes(token: str) -> bytes:
        """Return the token's bytes: the one byte that a token such as <0x0A> names, otherwise the UTF-8 bytes of its
        text after the Replace steps."""
        for pattern, content in replacements:
            token = token.replace(pattern, content)
        match = _BYTE_TOKEN.fullmatch(token)
        return bytes([int(match[1], 16)]) if match else token.encode()

    return _table(tokens, token_bytes, replace_each_byte=True, strip_start=strip["start"])


def _table(
    tokens: Mapping[int, str],
    token_bytes: Callable[[str], bytes],
    *,
    replace_each_byte: bool,
    first: Mapping[int, Piece] | None = None,
    strip_start: int = 0,
) -> TokenPieces:
    """Make the table from each token's bytes. A piece is text if the bytes are whole characters; otherwise it is bytes.
    Ids without a token, and one further id at the end, have empty pieces. `first` has the pieces that differ for a
    text's first token, and `strip_start` is the number of spaces to remove at the text's start. `replace_each_byte`:
    each wrong byte becomes a U+FFFD, not each broken character."""
    pieces: list[Piece] = [""] * (max(tokens, default=-1) + 2)
    for i, token in tokens.items():
        raw = token_bytes(token)
        try:
            pieces[i] = raw.decode()
        except UnicodeDecodeError:
            pieces[i] = raw
    return TokenPieces(pieces, replace_each_byte, first or {}, strip_start)


def _byte_alphabet() -> dict[str, int]:
    """Return the byte of each character of GPT-2's alphabet: printable bytes are spelt as themselves, the others by the
    characters from U+0100 on."""
    visible = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [b for b in range(256) if b not in visible]
    return {chr(b): b for b in visible} | {chr(256 + n): b for n, b in enumerate(hidden)}


_BYTE_OF = _byte_alphabet()
BYTE_ALPHABET = frozenset(_BYTE_OF)
