"""A GGUF file's tokenizer as a ModelFolder: tokenizer.json, special tokens, eos tokens, chat templates."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from quire_common.errors import Unsupported
from quire_common.gguf import Metadata, open_gguf
from quire_common.gguf.token_ids import VOCABULARY_KIND, eos_token_ids
from quire_tokenizer.gguf.byte_pair import byte_pair_json
from quire_tokenizer.gguf.sentence_piece import sentence_piece_json
from quire_tokenizer.gguf.token_list import TokenList, read_tokens
from quire_tokenizer.model_folder import DEFAULT_TEMPLATE, ModelFolder

_KINDS: Final[Mapping[str, Callable[[TokenList], dict[str, Any]]]] = MappingProxyType(
    {"gpt2": byte_pair_json, "llama": sentence_piece_json}
)
# Names of special tokens in chat templates -> llama.cpp's roles.
_ROLES: Final = {
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unknown",
    "sep_token": "seperator",  # llama.cpp spells it so
    "pad_token": "padding",
    "cls_token": "cls",
    "mask_token": "mask",
}
_TEMPLATE = "tokenizer.chat_template"
_NAMES = "tokenizer.chat_templates"


def read_gguf(path: Path) -> ModelFolder:
    """Read a file's tokenizer. Raises ConfigError or Unsupported."""
    model = open_gguf(path)
    metadata = model.metadata
    kind = metadata.text(VOCABULARY_KIND)
    if kind not in _KINDS:
        raise Unsupported(
            "UNSUPPORTED_TOKENIZER",
            f"{path} has a tokenizer of the kind {kind[:80]!r}, which is not supported. Supported: "
            f"{', '.join(_KINDS)}.",
            "Name a folder with tokenizer.json by --tokenizer.",
            param="model",
        )
    tokens = read_tokens(metadata)
    texts = ((name, tokens.special_token_text(role)) for name, role in _ROLES.items())
    return ModelFolder(
        name=model.name,
        tokenizer_json=json.dumps(_KINDS[kind](tokens), ensure_ascii=False).encode(),
        token_variables={name: text for name, text in texts if text},
        eos=eos_token_ids(metadata),
        templates=_templates(metadata),
        tokenizer_file=str(path),
    )


def _templates(metadata: Metadata) -> dict[str, str]:
    found = {DEFAULT_TEMPLATE: metadata.text(_TEMPLATE)} if _TEMPLATE in metadata else {}
    for name in metadata.texts(_NAMES) if _NAMES in metadata else ():
        found[name] = metadata.text(f"{_TEMPLATE}.{name}")
    return found
