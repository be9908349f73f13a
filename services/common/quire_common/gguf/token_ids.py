"""The special tokens of a GGUF file: their types, their ids by role, and the tokens that end an answer (eos tokens).

The worker and the tokenizer both read eos tokens here, so that they agree. The rules are those of llama.cpp's
src/llama-vocab.cpp, with three exceptions. A token that is not a control token is text, whatever it looks like. Tokens
of fill-in-the-middle do not end an answer. A `gpt2` vocabulary has no default ids. This module knows nothing of merges
or scores.
"""

from __future__ import annotations

from enum import IntEnum
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import numpy as np

from quire_common.columns import MAX_I32

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from quire_common.gguf.metadata import Metadata

TOKENS: Final = "tokenizer.ggml.tokens"
TOKEN_TYPES: Final = "tokenizer.ggml.token_type"
VOCABULARY_KIND: Final = "tokenizer.ggml.model"


class TokenType(IntEnum):
    """Types of tokens, by llama.cpp's numbers."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


# End of the text, of a turn, of a message.
_EOS_ROLES: Final = ("eos", "eot", "eom")
# Kind of vocabulary -> role -> the id that llama.cpp takes where the file names none.
_DEFAULT_IDS: Final[Mapping[str, Mapping[str, int]]] = MappingProxyType({"llama": {"unknown": 0, "bos": 1, "eos": 2}})
# A control token of one of these texts ends an answer, whatever ids the file names. Converters often name one eos
# token of several.
_EOS_TEXTS: Final = frozenset(
    (
        "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>",
        "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>",
        "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "<｜end▁of▁sentence｜>", "[e~[",
    )
)  # fmt: skip  # a list of texts
# A text -> groups of texts. Beside all texts of a group, the text ends a part of an answer and not the answer.
_EOS_UNLESS: Final[Mapping[str, tuple[frozenset[str], ...]]] = MappingProxyType(
    {
        "<|end|>": tuple(
            frozenset((call, other)) for call in ("<|call|>", "<|calls|>") for other in ("<|return|>", "<|flush|>")
        ),
        "</s>": (frozenset(("<|tool_response>",)),),
    }
)


def eos_token_ids(metadata: Metadata) -> tuple[int, ...]:
    """Return the ids of the tokens that end an answer, without repeats: those with the roles eos, eot and eom, then
    control tokens with a known text. Some texts do not count beside certain others. If the file names no eos token, a
    `llama` vocabulary has token 2 as one (see `special_token_id`).

    Empty if there is no such default, role or text. Raises ConfigError if a role has an id outside the vocabulary (-1
    too), and for damaged token types or tokens.
    """
    named = (special_token_id(metadata, role) for role in _EOS_ROLES)
    texts = _control_tokens(metadata)
    by_text = [
        i
        for text, i in texts.items()
        if text in _EOS_TEXTS and not any(group <= texts.keys() for group in _EOS_UNLESS.get(text, ()))
    ]
    return tuple(dict.fromkeys((*(i for i in named if i is not None), *by_text)))


def special_token_id(metadata: Metadata, role: str, *, required: bool = False) -> int | None:
    """Return the id of the token with a role: bos, eos, unknown, padding and so on. If the file names none, a `llama`
    vocabulary has default ids for some roles, provided that the file has such tokens. None if there is no id, also if
    it is `required`.

    An id outside the vocabulary counts as absent, as in llama.cpp. If its role is an eos role or it is `required`, the
    error is ConfigError instead. In a file without tokens, every id from 0 to the largest int32 is accepted. Raises
    ConfigError for a value that is no integer of at least -1.
    """
    key = f"tokenizer.ggml.{role}_token_id"
    size = len(metadata.text_array(TOKENS)) if TOKENS in metadata else None
    if key in metadata:
        found = metadata.integer(key, minimum=-1)
        if 0 <= found <= (MAX_I32 if size is None else size - 1):
            return found
        if required or role in _EOS_ROLES:
            raise metadata.bad(key, f"from 0 to {MAX_I32}" if size is None else f"an id of the {size} tokens")
    kind = metadata.values.get(VOCABULARY_KIND)
    default = _DEFAULT_IDS.get(kind, {}).get(role) if isinstance(kind, str) else None
    return default if default is not None and size is not None and default < size else None


def token_types(metadata: Metadata) -> NDArray[np.integer]:
    """Return the TokenType of each token, as integers. Raises ConfigError if they are absent, their number is not that
    of the tokens, or one is no TokenType."""
    types = metadata.integers(TOKEN_TYPES)
    size = len(metadata.text_array(TOKENS))
    if len(types) != size:
        raise metadata.bad(TOKEN_TYPES, f"one type for each of the {size} tokens")
    wrong = types[(types < min(TokenType)) | (types > max(TokenType))]
    if len(wrong):
        raise metadata.fault(f"`{TOKEN_TYPES}` holds {wrong[0]}; types are {min(TokenType)} to {max(TokenType)}")
    return types


def _control_tokens(metadata: Metadata) -> dict[str, int]:
    """Return the ids of the control tokens, by text; empty if the file has no tokens or no types. Raises ConfigError if
    they are damaged."""
    if TOKENS not in metadata or TOKEN_TYPES not in metadata:
        return {}
    ids: list[int] = np.flatnonzero(token_types(metadata) == TokenType.CONTROL).tolist()
    return dict(zip(metadata.texts(TOKENS, ids), ids, strict=True))
