"""Reads and checks the files of a model folder that concern text: special tokens, end-of-sequence (eos) tokens and chat
templates.

This module knows JSON and the names of Hugging Face's files. It knows nothing of how a tokenizer works. A file that
cannot be read or parsed is a ConfigError that names the file; most fields of a wrong type count as absent.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire_common.columns import MAX_I32
from quire_common.errors import ConfigError
from quire_common.gguf import gguf_files
from quire_common.model_hub import model_name

if TYPE_CHECKING:
    from collections.abc import Mapping

DEFAULT_TEMPLATE = "default"
TOOL_TEMPLATE = "tool_use"
EOS_FIELD = "eos_token_id"
# Names under which chat templates find the model's special tokens.
TOKEN_VARIABLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True)
class ModelFolder:
    """The contents of the files. `eos` holds ids and token texts as the files have them; the vocabulary resolves
    them."""

    name: str
    tokenizer_json: bytes = field(repr=False)
    token_variables: Mapping[str, str]
    eos: tuple[int | str, ...]
    templates: Mapping[str, str] = field(repr=False)
    tokenizer_file: str = "tokenizer.json"
    """The file that the tokenizer comes from, for error messages."""


def read_model_folder(
    model: str, tokenizer: str = "", chat_template: str = "", overrides: Mapping[str, Any] | None = None
) -> ModelFolder:
    """Read a model's folder, and the folder of its tokenizer if that is another folder. Raises ConfigError for a
    missing folder or tokenizer.json, for a file that is unreadable or malformed, and if neither folder is named; if one
    name is empty, the other counts for both.

    The name is the name of the model's folder. Eos tokens are the union of both folders' ids and the tokenizer's
    `eos_token`. `chat_template` is a file that replaces the tokenizer's own templates. Of `overrides`, only
    `eos_token_id` matters, which replaces that of the model's config.json.
    """
    if not model and not tokenizer:
        raise ConfigError("MODEL_REQUIRED", "No model folder was given.", "Pass --model FOLDER.", param="model")
    folder, text_folder = Path(model or tokenizer), Path(tokenizer or model)
    eos: list[int | str] = [*eos_ids_of_folder(folder, overrides)]
    if not text_folder.exists() or not text_folder.samefile(folder):
        eos += eos_ids_of_folder(text_folder)
    settings = _read_json(text_folder / "tokenizer_config.json")
    variables = _token_variables(settings, _read_json(text_folder / "special_tokens_map.json"))
    if "eos_token" in variables:
        eos.append(variables["eos_token"])
    templates = {DEFAULT_TEMPLATE: read_template(chat_template)} if chat_template else _templates(text_folder, settings)
    return ModelFolder(
        name=model_name(folder.resolve()),
        tokenizer_json=_read_tokenizer(text_folder / "tokenizer.json"),
        token_variables=variables,
        eos=tuple(dict.fromkeys(eos)),
        templates=templates,
        tokenizer_file=str(text_folder / "tokenizer.json"),
    )


def eos_ids_of_folder(folder: Path, overrides: Mapping[str, Any] | None = None) -> list[int]:
    """Return the eos ids of generation_config.json and of config.json; those in `overrides` replace the latter. Raises
    ConfigError if there is no such folder, a file is unreadable or malformed, or an id is no int32."""
    if not folder.is_dir():
        raise ConfigError(
            "MODEL_NOT_FOUND",
            f"There is no model folder or GGUF file {folder}.",
            "Give the path of a Hugging Face folder or a GGUF file.",
            param="model",
        )
    config = folder / "config.json"
    own = overridden_eos_ids(overrides) if overrides and EOS_FIELD in overrides else _eos_ids(config)
    return [*_eos_ids(folder / "generation_config.json"), *own]


def overridden_eos_ids(overrides: Mapping[str, Any]) -> list[int]:
    """Return the eos ids of --hf-overrides, none for null. Raises ConfigError for a number that is not an int32."""
    return _token_ids(overrides[EOS_FIELD], "--hf-overrides", "Give a token id, or a list of token ids.")


def read_template(path: str) -> str:
    """Read a chat template from its own file. Raises ConfigError if the file cannot be read or is not UTF-8."""
    return _read_text(Path(path))


def _read_tokenizer(path: Path) -> bytes:
    """Return the bytes of tokenizer.json. Raises ConfigError if the file cannot be read; the error names a GGUF file of
    the folder, if there is one."""
    try:
        return path.read_bytes()
    except OSError as error:
        cause = f"Cannot read {path}: {error.strerror}."
        fix = "Quire needs tokenizer.json: convert an older model with transformers, or name a folder with --tokenizer."
        files = gguf_files(path.parent)
        if files:
            cause, fix = f"{cause} The folder holds GGUF files.", f"Name one in place of the folder: {files[0]}."
        raise ConfigError("TOKENIZER_MISSING", cause, fix, param="model") from error


def _read_json(path: Path) -> dict[str, Any]:
    """Return the file's JSON object; empty if there is no such file. Raises ConfigError for a file that cannot be read,
    has no JSON object, or has a lone surrogate in it."""
    if not path.is_file():
        return {}
    try:
        loaded = json.loads(_read_text(path))
        # Half of a surrogate pair, which JSON can spell and UTF-8 does not have, raises here.
        json.dumps(loaded, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise ConfigError("BAD_MODEL_FILE", f"{path} is not valid JSON: {error}.", "Fetch the file again.") from error
    if not isinstance(loaded, dict):
        raise ConfigError("BAD_MODEL_FILE", f"{path} does not hold a JSON object.", "Fetch the file again.")
    return loaded


def _read_text(path: Path) -> str:
    """Read a UTF-8 file. Raises ConfigError if it cannot be read, or is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError("FILE_UNREADABLE", f"Cannot read {path}: {error.strerror}.", "Check the path.") from error
    except UnicodeDecodeError as error:
        raise ConfigError("BAD_MODEL_FILE", f"{path} is not UTF-8.", "Fetch the file again.") from error


def _token_variables(settings: Mapping[str, Any], special_map: Mapping[str, Any]) -> dict[str, str]:
    """Return the texts of special tokens by template variable. Each is looked up by itself: in tokenizer_config.json
    (`settings`), then in special_tokens_map.json. A variable that neither gives as a text, or as an object with such a
    `content`, is left out, and so is an empty text. Never raises."""
    variables = {}
    for name in TOKEN_VARIABLES:
        text = _token_text(settings.get(name)) or _token_text(special_map.get(name))
        if text:
            variables[name] = text
    return variables


def _token_text(value: object) -> str:
    """Return the text of a token. Files have a token as its text, or as an object with `content`."""
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else ""


def _eos_ids(path: Path) -> list[int]:
    """Return the ids of the file's `eos_token_id`, none without the file or the field. A multimodal config.json without
    them has those of its language model. Raises ConfigError for an unreadable or malformed file, and for an id that is
    no int32."""
    fields = _read_json(path)
    text = fields.get("text_config")
    if fields.get(EOS_FIELD) is None and isinstance(text, dict):
        fields = text
    return _token_ids(fields.get(EOS_FIELD), str(path), "Use the file of the model's own revision.")


def _token_ids(value: object, source: str, fix: str) -> list[int]:
    """Return the token ids of a field that has one id or a list of ids; other values, booleans too, are left out.
    Raises ConfigError, which names `source` and has `fix`, for a number that is not an int32."""
    values = value if isinstance(value, list) else [value]
    ids = [v for v in values if isinstance(v, int) and not isinstance(v, bool)]
    for wrong in (v for v in ids if abs(v) > MAX_I32):
        raise ConfigError(
            "BAD_MODEL_FILE",
            f"{source}: `{EOS_FIELD}` holds {repr(wrong)[:80]}; a token id is from 0 to {MAX_I32}.",
            fix,
        )
    return ids


def _templates(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the chat templates by name, from tokenizer_config.json or else chat_template.json. The file
    chat_template.jinja takes precedence as the default template, and files in additional_chat_templates over templates
    of their names. Malformed entries of the JSON files are left out. Raises ConfigError for a file that cannot be read,
    is not UTF-8 or has no JSON object."""
    found = settings.get("chat_template") or _read_json(folder / "chat_template.json").get("chat_template")
    templates: dict[str, str] = {}
    if isinstance(found, str):
        templates[DEFAULT_TEMPLATE] = found
    elif isinstance(found, list):
        for entry in found:
            if isinstance(entry, dict) and isinstance(entry.get("template"), str):
                templates[str(entry.get("name", DEFAULT_TEMPLATE))] = entry["template"]
    if (folder / "chat_template.jinja").is_file():
        templates[DEFAULT_TEMPLATE] = _read_text(folder / "chat_template.jinja")
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[path.stem] = _read_text(path)
    return templates
