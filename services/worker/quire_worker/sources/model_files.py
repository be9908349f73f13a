"""The files of a model: a folder in Hugging Face layout or a GGUF file, and the config in it."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from quire_common.errors import ConfigError, Unsupported
from quire_common.gguf import GgufModel, gguf_files, is_gguf, open_gguf
from quire_worker.model.config_file import ConfigFile, read_json
from quire_worker.model.text_part import TextPart, text_part
from quire_worker.sources.options import LoadFormat, LoadOptions, Progress
from quire_worker.weights.checkpoint import raise_for_gguf_files
from quire_worker.weights.gguf.config_fields import read_config as read_gguf_config


class ModelFiles(NamedTuple):
    """A model's path, its config, the GGUF file if it is one, and the language model if it is a multimodal one."""

    path: Path
    config: ConfigFile
    """The language model's, if it is part of a multimodal one."""
    gguf: GgufModel | None
    part: TextPart | None = None


def open_model(folder: str | Path, options: LoadOptions, progress: Progress) -> ModelFiles:
    """Report the phase `config`, and read the config of a model folder or GGUF file, with `hf_overrides` applied. Of a
    multimodal model, only the language model's config is returned. Raises ConfigError if a file is missing or
    malformed, or --load-format names another format. Raises Unsupported for weights that the config calls quantized,
    for a GGUF architecture or a multimodal class that is not supported, and for fields of these that ask for what the
    worker does not compute."""
    path = Path(folder)
    progress("config", 0, 0)
    gguf = open_gguf(path) if is_gguf(path) else None
    _check_load_format(path, options.load_format, gguf is not None)
    config = _read_config(path) if gguf is None else read_gguf_config(gguf)
    config = config.overridden(options.hf_overrides)
    _check_not_quantized(config)
    part = text_part(config, options.hf_overrides) if gguf is None else None
    if part is None:
        return ModelFiles(path, config, gguf)
    _check_not_quantized(part.config)
    return ModelFiles(path, part.config, None, part)


def _check_load_format(path: Path, load_format: LoadFormat, is_file: bool) -> None:
    """Raise ConfigError if --load-format names another format than the model has."""
    if (load_format == "safetensors" and is_file) or (load_format == "gguf" and path.is_dir()):
        files = gguf_files(path)
        named = f", or name a file: `--model {files[0]}`" if files else ""
        raise ConfigError(
            "LOAD_FORMAT_MISMATCH",
            f"--load-format {load_format} was given, and {path} is a {'GGUF file' if is_file else 'folder'}.",
            f"Leave --load-format out{named}.",
            param="load_format",
        )


def _read_config(path: Path) -> ConfigFile:
    """Read config.json of a model folder. Raises ConfigError if the folder or the file is missing; if the folder has
    GGUF files, the error names one."""
    if not path.is_dir():
        raise ConfigError(
            "MODEL_NOT_FOUND",
            f"There is no model folder or GGUF file {path}.",
            "Give the path of a Hugging Face folder or a GGUF file.",
        )
    file = path / "config.json"
    if not file.is_file():
        raise_for_gguf_files("MISSING_CONFIG", path, "config.json")
        raise ConfigError("MISSING_CONFIG", f"{path} has no config.json.", "Download the whole model folder.")
    return ConfigFile(read_json(file), str(file))


def _check_not_quantized(config: ConfigFile) -> None:
    """Raise Unsupported for a config.json that says that weights are quantized."""
    if config.has("quantization_config"):
        raise Unsupported(
            "UNSUPPORTED_QUANTIZATION",
            f"{config.source} describes quantised weights, which are not supported.",
            "Serve the unquantised checkpoint.",
        )
