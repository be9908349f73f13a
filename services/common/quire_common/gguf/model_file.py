"""GgufModel: a model that is one GGUF file, or several shards into which llama.cpp split it.

This module knows the names and numbers of shards; it does not know the meaning of tensors.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from quire_common.errors import ConfigError
from quire_common.gguf import faults
from quire_common.gguf.header import MAGIC, GgufFile, TensorPlace, read_header
from quire_common.gguf.metadata import Metadata

MAX_SHARDS = 1024
_SUFFIX = ".gguf"
_SHARD_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


@dataclass(frozen=True, slots=True)
class GgufModel:
    """One model, of all its files."""

    name: str
    """The file's name without `.gguf` and, for a model of several shards, without the shard number."""
    metadata: Metadata
    """Metadata of the first file."""
    tensors: Mapping[str, TensorPlace]
    """Tensors of all files, by name."""
    files: tuple[GgufFile, ...]


def is_gguf(path: Path) -> bool:
    """Return whether a path is a GGUF file: an existing file that ends in .gguf, in any case, or else one that begins
    with GGUF's magic bytes. Only these bytes are looked at: a damaged file, or one in .gguf that cannot be read, counts
    too. False for a file of another name that cannot be read, and for a path that cannot be looked up."""
    try:
        if path.suffix.lower() == _SUFFIX:
            return path.is_file()
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def gguf_files(folder: Path) -> list[Path]:
    """Return the files of a folder that end in .gguf, in any case, sorted by path; an empty list if the folder cannot
    be read."""
    try:
        return sorted(path for path in folder.iterdir() if path.suffix.lower() == _SUFFIX and path.is_file())
    except OSError:
        return []


def open_gguf(path: Path) -> GgufModel:
    """Read the headers of a model: of one file, or of all shards of a split model, of which `path` may be any. The
    shards' tensors are merged; the metadata are the first shard's. Raises ConfigError for a missing, damaged or
    misnamed file, for a path that cannot be looked up, for shards that do not fit together, and for more than 1024 of
    them. Raises Unsupported as `read_header` does."""
    try:
        found = path.is_file()
    except OSError as error:
        raise ConfigError(
            "MODEL_NOT_FOUND", f"{path} cannot be looked up: {error.strerror}.", "Check the path.", param="model"
        ) from error
    if not found:
        raise ConfigError("MODEL_NOT_FOUND", f"There is no file {path}.", "Check the path.", param="model")
    named = read_header(path)
    count = named.metadata.integer("split.count", 0)
    if count <= 1:
        return GgufModel(_without_suffix(path), named.metadata, named.tensors, (named,))
    match = _SHARD_NAME.fullmatch(path.name)
    if match is None or int(match["count"]) != count:
        raise ConfigError(
            "BAD_GGUF_SPLIT",
            f"{path} is one of {count} shards, which its name does not say.",
            f"Give the shards their names back: NAME-00001-of-{count:05}.gguf and so on.",
            param="model",
        )
    if count > MAX_SHARDS:
        raise faults.corrupt(path, f"it is one of {count} shards, and at most {MAX_SHARDS} are read")
    files = _shards(path, match["stem"], count, named)
    tensors: dict[str, TensorPlace] = {}
    for file in files:
        for name, place in file.tensors.items():
            if name in tensors:
                raise faults.corrupt(file.path, f"it holds tensor {name}, as {tensors[name].path.name} does")
            tensors[name] = place
    promised = files[0].metadata.integer("split.tensors.count", len(tensors))
    if promised != len(tensors):
        raise faults.corrupt(files[0].path, f"it promises {promised} tensors, the {count} shards hold {len(tensors)}")
    return GgufModel(match["stem"], files[0].metadata, tensors, files)


def _shards(path: Path, stem: str, count: int, named: GgufFile) -> tuple[GgufFile, ...]:
    """Read the headers of all shards in `path`'s folder, in order; `named` is that of `path`, which was read already.
    Raises ConfigError if shards are missing, or a shard's own number or count is another, and the errors of
    `read_header`."""
    paths = [path.with_name(f"{stem}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)]
    missing = [each.name for each in paths if not each.is_file()]
    if missing:
        shown = ", ".join(missing[:8]) + (", ..." if len(missing) > 8 else "")
        raise ConfigError(
            "MISSING_SHARD",
            f"{path.parent} lacks {len(missing)} of the {count} shards of {stem}: {shown}.",
            "Download the missing shards of the same revision.",
            param="model",
        )
    files = tuple(named if each == path else read_header(each) for each in paths)
    for number, file in enumerate(files):
        found = file.metadata.integer("split.no", -1, minimum=-1), file.metadata.integer("split.count", 0)
        if found != (number, count):
            raise faults.corrupt(file.path, f"it says that it is shard {found[0] + 1} of {found[1]}")
    return files


def _without_suffix(path: Path) -> str:
    """Return the file's name without `.gguf`. `Llama-3.1-8B` has no suffix, though `Path.stem` finds one."""
    return path.stem if path.suffix.lower() == _SUFFIX else path.name
