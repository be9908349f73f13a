"""The tokens of a GGUF file with their types, checked: as many types as tokens, no token twice.

Knows how llama.cpp writes vocabularies; knows nothing of merges or scores.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from quire_common.errors import ConfigError
from quire_common.gguf import Metadata
from quire_common.gguf.token_ids import token_id

NORMAL: Final = 1
UNKNOWN: Final = 2
CONTROL: Final = 3
USER_DEFINED: Final = 4
UNUSED: Final = 5
BYTE: Final = 6
_TOKENS, _TYPES = "tokenizer.ggml.tokens", "tokenizer.ggml.token_type"


@dataclass(frozen=True, slots=True)
class TokenList:
    """`tokens` and `types` by id."""

    tokens: list[str]
    types: list[int]
    metadata: Metadata

    @property
    def vocabulary(self) -> dict[str, int]:
        """Ids by text."""
        return {text: i for i, text in enumerate(self.tokens)}

    def text_of(self, part: str) -> str | None:
        """The token of a part (bos, eos, unknown and so on). Raises ConfigError for an id that is none."""
        found = token_id(self.metadata, part)
        if found is None:
            return None
        if found >= len(self.tokens):
            raise self.metadata.bad(f"tokenizer.ggml.{part}_token_id", f"below {len(self.tokens)}")
        return self.tokens[found]

    def added_tokens(self) -> list[dict[str, Any]]:
        """Tokens that are found in texts as a whole, as tokenizer.json has them; control tokens are special."""
        return [
            {
                "id": i,
                "content": text,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": kind != USER_DEFINED,
            }
            for i, (text, kind) in enumerate(zip(self.tokens, self.types, strict=True))
            if kind in (UNKNOWN, CONTROL, USER_DEFINED) and text
        ]

    def around(self, *, bos: bool, eos: bool) -> dict[str, Any] | None:
        """The post-processor that puts bos and eos around a text; None where it puts nothing."""
        texts = {"bos": self.text_of("bos") if bos else None, "eos": self.text_of("eos") if eos else None}
        for part, wanted in (("bos", bos), ("eos", eos)):
            if wanted and texts[part] is None:
                raise self.metadata.bad(f"tokenizer.ggml.{part}_token_id", f"a token, as add_{part}_token is true")
        if not (bos or eos):
            return None
        ids = {text: token_id(self.metadata, part) for part, text in texts.items() if text is not None}
        return {
            "type": "TemplateProcessing",
            "single": [*_special(texts["bos"], 0), _sequence("A", 0), *_special(texts["eos"], 0)],
            "pair": [
                *_special(texts["bos"], 0),
                _sequence("A", 0),
                *_special(texts["eos"], 0),
                _sequence("B", 1),
                *_special(texts["eos"], 1),
            ],
            "special_tokens": {text: {"id": text, "ids": [i], "tokens": [text]} for text, i in ids.items()},
        }


def read_tokens(metadata: Metadata) -> TokenList:
    """Read and check. Raises ConfigError."""
    tokens = metadata.texts(_TOKENS)
    types = [int(kind) for kind in metadata.numbers(_TYPES).tolist()]
    if len(types) != len(tokens):
        raise metadata.bad(_TYPES, f"a list of {len(tokens)}, as there are tokens")
    if len(set(tokens)) != len(tokens):
        raise ConfigError(
            "BAD_TOKENIZER",
            f"{metadata.path}: `{_TOKENS}` holds {_twice(tokens)[:80]!r} twice.",
            "Convert the model with a current llama.cpp.",
        )
    return TokenList(tokens, types, metadata)


def _twice(tokens: Iterable[str]) -> str:
    seen = set[str]()
    for text in tokens:
        if text in seen:
            return text
        seen.add(text)
    return ""


def _special(text: str | None, sequence: int) -> list[dict[str, Any]]:
    return [] if text is None else [{"SpecialToken": {"id": text, "type_id": sequence}}]


def _sequence(name: str, number: int) -> dict[str, Any]:
    return {"Sequence": {"id": name, "type_id": number}}
