"""The text files of a model and of its tokenizer, each of which is a folder or a GGUF file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire_common.gguf import is_gguf, open_gguf
from quire_common.gguf.token_ids import eos_token_ids
from quire_common.model_hub import model_name
from quire_tokenizer.gguf.gguf_tokenizer import read_gguf
from quire_tokenizer.model_folder import (
    DEFAULT_TEMPLATE,
    EOS_FIELD,
    ModelFolder,
    eos_ids_of_folder,
    overridden_eos_ids,
    read_model_folder,
    read_template,
)

if TYPE_CHECKING:
    from collections.abc import Mapping


def read_model_files(
    model: str, tokenizer: str = "", chat_template: str = "", overrides: Mapping[str, Any] | None = None
) -> ModelFolder:
    """Read the text files of a model and its tokenizer, each a folder or a GGUF file; if one is empty, the other counts
    for both. Name and first EOS ids come from the model, all else from the tokenizer. `chat_template` is a file that
    replaces the templates; of `overrides`, only EOS ids matter, which replace those of the model's configuration.
    Raises ConfigError for a file that is missing, unreadable or malformed, and Unsupported for a kind of GGUF tokenizer
    that Quire does not have."""
    main, text = Path(model or tokenizer), Path(tokenizer or model)
    if not is_gguf(main) and not is_gguf(text):
        return read_model_folder(model, tokenizer, chat_template, overrides)
    if is_gguf(text):
        found = read_gguf(text)
        if chat_template:
            found = replace(found, templates={DEFAULT_TEMPLATE: read_template(chat_template)})
    else:
        found = read_model_folder(tokenizer, tokenizer, chat_template)
    if main == text and not overrides:
        return found
    name, eos = _name_and_eos(main, overrides)
    # The model may be named by two paths.
    return replace(found, name=name, eos=eos if main.samefile(text) else tuple(dict.fromkeys((*eos, *found.eos))))


def _name_and_eos(model: Path, overrides: Mapping[str, Any] | None) -> tuple[str, tuple[int, ...]]:
    """Return the name and the EOS ids that a model itself gives, whatever its tokenizer is. EOS ids of `overrides`
    replace those of config.json or of the GGUF file. Raises ConfigError for a missing folder, an unreadable or
    malformed file, and ids that are no int32."""
    if is_gguf(model):
        opened = open_gguf(model)
        if overrides and EOS_FIELD in overrides:
            return opened.name, tuple(overridden_eos_ids(overrides))
        return opened.name, eos_token_ids(opened.metadata)
    eos = eos_ids_of_folder(model, overrides)
    return model_name(model.resolve()), tuple(eos)
