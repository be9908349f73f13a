"""Reads a GGUF file's tokenizer as a ModelFolder: tokenizer.json, special tokens, end-of-sequence tokens, chat
templates."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from quire_common.gguf import Metadata, open_gguf
from quire_common.gguf.token_ids import eos_token_ids
from quire_common.gguf.tokenizer.tokenizer_json import read_tokenizer
from quire_tokenizer.model_folder import DEFAULT_TEMPLATE, ModelFolder

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
    """Read the tokenizer, the texts of special tokens, the EOS ids and the chat templates of a GGUF file. Raises
    ConfigError for a bad file, and Unsupported for a kind of tokenizer that Quire does not have."""
    model = open_gguf(path)
    metadata = model.metadata
    tokenizer_json, tokens = read_tokenizer(metadata)
    texts = ((name, tokens.special_token_text(role)) for name, role in _ROLES.items())
    return ModelFolder(
        name=model.name,
        tokenizer_json=tokenizer_json,
        token_variables={name: text for name, text in texts if text},
        eos=eos_token_ids(metadata),
        templates=_templates(metadata),
        tokenizer_file=str(path),
    )


def _templates(metadata: Metadata) -> dict[str, str]:
    """Return the chat templates of the file by name. The unnamed one is DEFAULT_TEMPLATE; there may be none."""
    found = {DEFAULT_TEMPLATE: metadata.text(_TEMPLATE)} if _TEMPLATE in metadata else {}
    for name in metadata.texts(_NAMES) if _NAMES in metadata else ():
        found[name] = metadata.text(f"{_TEMPLATE}.{name}")
    return found
