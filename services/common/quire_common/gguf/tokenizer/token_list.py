"""The tokens of a GGUF file with their types, as tokenizer.json lists them: added tokens and what surrounds a text.

This module knows how llama.cpp writes vocabularies, and nothing of merges or scores.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from quire_common.errors import ConfigError
from quire_common.gguf import Metadata
from quire_common.gguf.faults import CONVERT
from quire_common.gguf.token_ids import TOKENS, TokenType, special_token_id, token_types

_ADDED: Final = frozenset((TokenType.UNKNOWN, TokenType.CONTROL, TokenType.USER_DEFINED))


@dataclass(frozen=True, slots=True)
class TokenList:
    """Tokens and types by id."""

    tokens: list[str]
    """No token is there twice."""
    types: list[int]
    """A TokenType for each token."""
    metadata: Metadata

    @property
    def vocabulary(self) -> dict[str, int]:
        """Ids by text."""
        return {text: i for i, text in enumerate(self.tokens)}

    def special_token_text(self, role: str) -> str | None:
        """Return the text of the token with a role, which `special_token_id` finds; None if there is none. Raises
        ConfigError as that does."""
        found = special_token_id(self.metadata, role)
        return None if found is None else self.tokens[found]

    def added_tokens(self) -> list[dict[str, Any]]:
        """Return the entries `added_tokens` of tokenizer.json: unknown, control and user-defined tokens, which are
        found in texts as a whole. All but user-defined tokens are special. Tokens without text are left out."""
        return [
            {
                "id": i,
                "content": text,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": kind != TokenType.USER_DEFINED,
            }
            for i, (text, kind) in enumerate(zip(self.tokens, self.types, strict=True))
            if kind in _ADDED and text
        ]

    def post_processor(self, *, adds_bos: bool, default_of: str) -> dict[str, Any] | None:
        """Return the post-processor that puts bos and eos around a text; None if it adds no token. In a pair, bos
        stands before the first text alone, and eos behind each of them.

        `adds_bos` is the default if the file does not say whether bos is added; `default_of` names the origin of this
        default in errors. Raises ConfigError if a token must be added and the file does not have it.
        """
        bos = self._added_token("bos", adds_bos, default_of)
        eos = self._added_token("eos", False, default_of)
        if bos is None and eos is None:
            return None
        ids = {self.tokens[i]: i for i in (bos, eos) if i is not None}
        before, after = self._special(bos, 0), self._special(eos, 0)
        return {
            "type": "TemplateProcessing",
            "single": [*before, _sequence("A", 0), *after],
            "pair": [*before, _sequence("A", 0), *after, _sequence("B", 1), *self._special(eos, 1)],
            "special_tokens": {text: {"id": text, "ids": [i], "tokens": [text]} for text, i in ids.items()},
        }

    def _added_token(self, role: str, default: bool, default_of: str) -> int | None:
        """Return the id of the bos or eos token (`role`) that is put at each text's beginning or end; None if none is.
        `default` applies if the file does not say. Raises ConfigError if one is to be added and the file has none, by
        name or by its kind's default."""
        key = f"tokenizer.ggml.add_{role}_token"
        if not self.metadata.flag(key, default):
            return None
        found = special_token_id(self.metadata, role, required=True)
        if found is None:
            cause = f"`{key}` is true" if key in self.metadata else f"{default_of} adds one to each text"
            raise self.metadata.fault(f"{cause}, and the file names none (`tokenizer.ggml.{role}_token_id`)")
        return found

    def _special(self, token: int | None, sequence: int) -> list[dict[str, Any]]:
        """Return the template's entry for a token; empty for None. `sequence` is its type id."""
        return [] if token is None else [{"SpecialToken": {"id": self.tokens[token], "type_id": sequence}}]


def read_tokens(metadata: Metadata) -> TokenList:
    """Return the file's tokens with their types. Raises ConfigError if one is missing or damaged, or a token is there
    twice."""
    tokens = metadata.texts(TOKENS)
    types: list[int] = token_types(metadata).tolist()
    if len(set(tokens)) != len(tokens):
        raise ConfigError(
            "BAD_TOKENIZER",
            f"{metadata.path}: `{TOKENS}` holds {_twice(tokens)[:80]!r} twice.",
            CONVERT,
        )
    return TokenList(tokens, types, metadata)


def _twice(tokens: Iterable[str]) -> str:
    """Return the first text that is there a second time; an empty text if there is none."""
    seen = set[str]()
    for text in tokens:
        if text in seen:
            return text
        seen.add(text)
    return ""


def _sequence(name: str, number: int) -> dict[str, Any]:
    return {"Sequence": {"id": name, "type_id": number}}
