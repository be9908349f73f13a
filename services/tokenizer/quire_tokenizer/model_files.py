"""The text files of a model, wherever they are: a folder, a GGUF file, or a file beside a tokenizer's folder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from quire_common.gguf import is_gguf, open_gguf
from quire_tokenizer.gguf.text_files import gguf_ends, read_gguf
from quire_tokenizer.model_folder import DEFAULT_TEMPLATE, ModelFolder, read_model_folder, read_template


def read_model_files(model: str, tokenizer: str = "", chat_template: str = "") -> ModelFolder:
    """As read_model_folder, where `model` and `tokenizer` may be GGUF files too. Raises ConfigError or Unsupported."""
    text, main = Path(tokenizer or model), Path(model or tokenizer)
    if is_gguf(text):
        found = read_gguf(text)
        return replace(found, templates={DEFAULT_TEMPLATE: read_template(chat_template)}) if chat_template else found
    if not is_gguf(main):
        return read_model_folder(model, tokenizer, chat_template)
    named, found = open_gguf(main), read_model_folder(tokenizer, tokenizer, chat_template)
    return replace(found, name=named.name, eos=tuple(dict.fromkeys((*gguf_ends(named), *found.eos))))
