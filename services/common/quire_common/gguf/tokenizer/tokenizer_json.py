"""From a GGUF file's metadata to tokenizer.json, by the kind of its vocabulary."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

from quire_common.errors import Unsupported
from quire_common.gguf import Metadata
from quire_common.gguf.token_ids import VOCABULARY_KIND
from quire_common.gguf.tokenizer.byte_pair import byte_pair_json
from quire_common.gguf.tokenizer.sentence_piece import sentence_piece_json
from quire_common.gguf.tokenizer.token_list import TokenList, read_tokens

_KINDS: Final[Mapping[str, Callable[[TokenList], dict[str, Any]]]] = MappingProxyType(
    {"gpt2": byte_pair_json, "llama": sentence_piece_json}
)


def read_tokenizer(metadata: Metadata) -> tuple[bytes, TokenList]:
    """Return a file's tokenizer as the bytes of a tokenizer.json, and its tokens. Raises ConfigError if the
    vocabulary's kind, tokens, types, merges or scores are missing or damaged, or a token that is to be added to texts
    is missing. Raises Unsupported for another kind of vocabulary, and as that kind's function does."""
    kind = metadata.text(VOCABULARY_KIND)
    if kind not in _KINDS:
        raise Unsupported(
            "UNSUPPORTED_TOKENIZER",
            f"{metadata.path} has a tokenizer of the kind {kind[:80]!r}, which is not supported. Supported: "
            f"{', '.join(_KINDS)}.",
            "Name a folder with tokenizer.json by --tokenizer.",
            param="model",
        )
    tokens = read_tokens(metadata)
    return json.dumps(_KINDS[kind](tokens), ensure_ascii=False).encode(), tokens
