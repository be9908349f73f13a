"""Parses names of models of the Hugging Face hub, and finds these models in the hub's cache on disk.

This module knows the layout of the cache and the names of a model's files. It opens no connections, which
`quire.hub.download` does.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from quire.errors import InvalidArgument

DEFAULT_REVISION: Final = "main"
CONFIG_FILE: Final = "config.json"
TOKENIZER_FILE: Final = "tokenizer.json"
SINGLE_WEIGHT_FILE: Final = "model.safetensors"
SHARD_INDEX_FILE: Final = "model.safetensors.index.json"

_NAME_PART = r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9_])?"
_HUB_NAME = re.compile(rf"(?P<repo>{_NAME_PART}/{_NAME_PART})(?::(?P<quant>[A-Za-z0-9_-]+))?")
_MAX_NAME_CHARS = 160
_REVISION = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._/-]{0,199}")
_COMMIT = re.compile("[0-9a-f]{40}")
_SHARD = re.compile(r"\w[\w.-]*\.safetensors", re.ASCII)
# Repositories keep the parts of a large model in a folder. Files in deeper folders are not considered.
_GGUF = re.compile(r"(?:\w[\w.-]*/)?\w[\w.-]*\.gguf", re.ASCII)
_GGUF_PART = re.compile(r"-(\d{5})-of-(\d{5})(?=\.gguf$)")
# Files of this name hold the image encoder of a multimodal model.
_PROJECTOR_PREFIX = "mmproj"
_MAX_INDEX_BYTES = 16 << 20
_MAX_LISTED = 8


@dataclass(frozen=True, slots=True)
class HubModel:
    """A model of the hub: `org/name`, or `org/name:QUANT` for one GGUF file of several."""

    repo: str
    quant: str
    revision: str
    cache_dir: Path
    """The folder of the cache: that of `hub_cache_folder`, unless the user names another one."""

    @property
    def repo_folder(self) -> Path:
        """The folder of the repository in the cache."""
        return self.cache_dir / f"models--{self.repo.replace('/', '--')}"

    @property
    def download_command(self) -> str:
        """The command line that downloads the model."""
        revision_option = "" if self.revision == DEFAULT_REVISION else f" --revision {self.revision}"
        cache_option = "" if self.cache_dir == hub_cache_folder() else f" --cache-dir {self.cache_dir}"
        return f"hf download {self.repo}{revision_option}{cache_option}"


def parse_hub_name(name: str, revision: str = "", download_dir: str = "") -> HubModel | None:
    """Return the model that a name of the form `org/name` or `org/name:QUANT` means, or None for other texts, such as
    longer paths, and names that end with .gguf or contain `--` or `..`. An empty `revision` means main, and an empty
    `download_dir` the folder of `hub_cache_folder`. Raises InvalidArgument for a malformed revision."""
    match = _HUB_NAME.fullmatch(name) if len(name) <= _MAX_NAME_CHARS else None
    if match is None or "--" in name or ".." in name or name.lower().endswith(".gguf"):
        return None
    revision = revision or DEFAULT_REVISION
    if not _REVISION.fullmatch(revision) or ".." in revision or "//" in revision or revision.endswith("/"):
        raise InvalidArgument(
            "BAD_REVISION", f"revision is {revision[:80]!r}.", "Give a branch, a tag or a commit.", param="revision"
        )
    cache = Path(download_dir).expanduser().absolute() if download_dir else hub_cache_folder()
    return HubModel(match["repo"], match["quant"] or "", revision, cache)


def hub_cache_folder() -> Path:
    """Return the folder in which the library huggingface_hub keeps models: HF_HUB_CACHE, HUGGINGFACE_HUB_CACHE, or
    `hub` in HF_HOME. HF_HOME is by default `huggingface` in XDG_CACHE_HOME, or in ~/.cache. Variables and ~ in these
    paths are expanded."""
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if path := os.environ.get(variable):
            return _expand_path(path)
    if home := os.environ.get("HF_HOME"):
        return _expand_path(home) / "hub"
    return _expand_path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface" / "hub"


def snapshot_folder(model: HubModel) -> Path | None:
    """Return the folder of the model's revision, or None if the cache has no such revision. A branch or tag is looked
    up in the cache's `refs`. Files may be missing in the folder."""
    commit = model.revision
    if not _COMMIT.fullmatch(commit):
        try:
            with (model.repo_folder / "refs" / commit).open(encoding="ascii") as file:
                commit = file.read(64).strip()
        except (OSError, ValueError):
            return None
        if not _COMMIT.fullmatch(commit):
            return None
    folder = model.repo_folder / "snapshots" / commit
    return folder if folder.is_dir() else None


def find_cached_model(model: HubModel, *, tokenizer_only: bool = False) -> Path | None:
    """Return the model's folder or its GGUF file if the cache has all needed files, else None. Safetensors come before
    GGUF files, unless the name asks for a quantisation. Their folder must also have config.json and tokenizer.json.

    With `tokenizer_only`, these two files are enough, unless the name asks for a quantisation. Raises InvalidArgument
    if the weights must come from a GGUF file, and several GGUF models match the name.
    """
    folder = snapshot_folder(model)
    if folder is None:
        return None
    has_config_and_tokenizer = (folder / CONFIG_FILE).is_file() and (folder / TOKENIZER_FILE).is_file()
    if tokenizer_only and has_config_and_tokenizer and not model.quant:
        return folder
    weight_files = snapshot_weight_files(folder, model)
    if not weight_files or not all((folder / name).is_file() for name in weight_files):
        return None
    if weight_files[0].endswith(".gguf"):
        return folder / weight_files[0]
    return folder if has_config_and_tokenizer else None


def snapshot_weight_files(folder: Path, model: HubModel) -> tuple[str, ...]:
    """Return the names of all weight files of a snapshot's model. Some of the files may be missing. The result is empty
    if the snapshot has no weights. Raises the errors of `select_weight_files`."""
    names = [str(path.relative_to(folder)) for depth in ("*", "*/*") for path in folder.glob(f"{depth}.gguf")]
    if (folder / SINGLE_WEIGHT_FILE).is_file():
        names.append(SINGLE_WEIGHT_FILE)
    return select_weight_files(names, model, read_shard_names(folder / SHARD_INDEX_FILE))


def select_weight_files(names: Collection[str], model: HubModel, shards: Collection[str] = ()) -> tuple[str, ...]:
    """Return the weight files to load, in order, out of the names of a repository's files; empty if there are none.

    Safetensors come before GGUF, unless the model's name asks for a GGUF file. `shards` are the files that the index of
    safetensors names. All parts of a split GGUF file count, also those that `names` lacks; image encoders (mmproj) do
    not. Raises InvalidArgument if several GGUF models match.
    """
    if not model.quant and (shards or SINGLE_WEIGHT_FILE in names):
        return tuple(sorted(shards)) or (SINGLE_WEIGHT_FILE,)
    pattern = _quant_pattern(model.quant)
    models: dict[str, tuple[str, ...]] = {}
    for name in sorted(names):
        if _GGUF.fullmatch(name) and not name.rpartition("/")[2].startswith(_PROJECTOR_PREFIX) and pattern.search(name):
            models.setdefault(_GGUF_PART.sub("", name), _split_gguf_files(name))
    if len(models) > 1:
        shown = ", ".join(list(models)[:_MAX_LISTED]) + (", ..." if len(models) > _MAX_LISTED else "")
        raise InvalidArgument(
            "SEVERAL_GGUF_MODELS",
            f"{model.repo} holds {len(models)} GGUF models: {shown}.",
            f"Say which after a colon, by the end of its name: {model.repo}:Q4_K_M.",
            param="model",
        )
    return next(iter(models.values()), ())


def read_shard_names(index: Path) -> tuple[str, ...]:
    """Return the files that an index of safetensors names. Names with a folder in them, or without the ending
    .safetensors, are left out.

    The result is empty if there is no index, or if the index cannot be read or is larger than 16 MiB. In the second
    case the worker reports the error when it loads the model.
    """
    try:
        if index.stat().st_size > _MAX_INDEX_BYTES:
            return ()
        files = json.loads(index.read_bytes())["weight_map"].values()
        return tuple(sorted({file for file in files if isinstance(file, str) and _SHARD.fullmatch(file)}))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return ()


def model_name(folder: Path) -> str:
    """Return the model's name: `org/name` if the folder is a snapshot in the hub's cache, else the folder's name."""
    if _COMMIT.fullmatch(folder.name) and folder.parent.name == "snapshots":
        prefix, _, repo = folder.parent.parent.name.partition("--")
        if prefix == "models" and repo:
            return repo.replace("--", "/", 1)
    return folder.name


def _expand_path(path: str) -> Path:
    return Path(os.path.expandvars(path)).expanduser().absolute()


def _quant_pattern(quant: str) -> re.Pattern[str]:
    """Return the pattern, case-insensitive, that file names of this quantisation contain; for an empty one, every name
    matches. That of Q4_K does not match Q4_K_M."""
    return re.compile(rf"(?:^|[-._/]){re.escape(quant)}(?=[-./])" if quant else "", re.IGNORECASE)


def _split_gguf_files(name: str) -> tuple[str, ...]:
    """Return all files, in order, of the GGUF model to which a file belongs: of `X-00002-of-00003.gguf` all three, of
    another name only itself."""
    match = _GGUF_PART.search(name)
    if match is None or not 0 < int(match[2]) <= 10_000:
        return (name,)
    return tuple(_GGUF_PART.sub(f"-{number:05}-of-{match[2]}", name) for number in range(1, int(match[2]) + 1))
