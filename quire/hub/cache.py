"""Models of the Hugging Face hub, as the hub's cache on disk has them: names, revisions, and which files make a model.

Knows the layout of the cache and the names of files. Opens no connection: that is `quire.hub.download`.
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
CONFIG: Final = "config.json"
TOKENIZER: Final = "tokenizer.json"
SINGLE: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"

_WORD = r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9_])?"
_NAME = re.compile(rf"(?P<repo>{_WORD}/{_WORD})(?::(?P<quant>[A-Za-z0-9_]+))?")
_MOST_NAME = 160
_REVISION = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._/-]{0,199}")
_COMMIT = re.compile("[0-9a-f]{40}")
_SHARD = re.compile(r"\w[\w.-]*\.safetensors", re.ASCII)
# At most one folder deep, as repositories have the parts of a large model.
_GGUF = re.compile(r"(?:\w[\w.-]*/)?\w[\w.-]*\.gguf", re.ASCII)
_PART = re.compile(r"-(\d{5})-of-(\d{5})(?=\.gguf$)")
# The image part of a multimodal model.
_PROJECTOR = "mmproj"
_MOST_INDEX_BYTES = 16 << 20
_FEW = 8


@dataclass(frozen=True, slots=True)
class HubModel:
    """A model of the hub: `org/name`, or `org/name:QUANT` for one GGUF file of several."""

    repo: str
    quant: str
    revision: str
    cache: Path
    """The folder of the cache, `HF_HUB_CACHE` unless the user names another."""

    @property
    def folder(self) -> Path:
        """The repository's own folder in the cache."""
        return self.cache / f"models--{self.repo.replace('/', '--')}"

    @property
    def download_command(self) -> str:
        """The command line that fetches it."""
        revision = "" if self.revision == DEFAULT_REVISION else f" --revision {self.revision}"
        place = "" if self.cache == cache_folder() else f" --cache-dir {self.cache}"
        return f"hf download {self.repo}{revision}{place}"


def hub_model(name: str, revision: str = "", download_dir: str = "") -> HubModel | None:
    """Return the model that a name of the hub's form means, or None for another text, such as a path. Raises
    InvalidArgument for a revision that is none."""
    found = _NAME.fullmatch(name) if len(name) <= _MOST_NAME else None
    if found is None or "--" in name or ".." in name or name.lower().endswith(".gguf"):
        return None
    revision = revision or DEFAULT_REVISION
    if not _REVISION.fullmatch(revision) or ".." in revision or "//" in revision or revision.endswith("/"):
        raise InvalidArgument(
            "BAD_REVISION", f"revision is {revision[:80]!r}.", "Give a branch, a tag or a commit.", param="revision"
        )
    cache = Path(download_dir).expanduser().absolute() if download_dir else cache_folder()
    return HubModel(found["repo"], found["quant"] or "", revision, cache)


def cache_folder() -> Path:
    """Return the folder in which the hub's own library keeps models: HF_HUB_CACHE, or `hub` in HF_HOME, which is by
    default ~/.cache/huggingface."""
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if place := os.environ.get(variable):
            return _expanded(place)
    if home := os.environ.get("HF_HOME"):
        return _expanded(home) / "hub"
    return _expanded(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface" / "hub"


def snapshot(model: HubModel) -> Path | None:
    """Return the folder of the model's revision, whatever files it has; None where the cache has no such revision."""
    commit = model.revision
    if not _COMMIT.fullmatch(commit):
        try:
            with (model.folder / "refs" / commit).open(encoding="ascii") as file:
                commit = file.read(64).strip()
        except (OSError, ValueError):
            return None
        if not _COMMIT.fullmatch(commit):
            return None
    folder = model.folder / "snapshots" / commit
    return folder if folder.is_dir() else None


def cached(model: HubModel, *, text_only: bool = False) -> Path | None:
    """Return the model's folder, or its GGUF file, where the cache has all of it; else None. `text_only`: without the
    weights, unless they are a GGUF file, which holds the tokenizer too. Raises InvalidArgument where several GGUF files
    are there and the name does not say which."""
    folder = snapshot(model)
    if folder is None:
        return None
    has_texts = (folder / CONFIG).is_file() and (folder / TOKENIZER).is_file()
    if text_only and has_texts and not model.quant:
        return folder
    weights = weights_in(folder, model)
    if not weights or not all((folder / name).is_file() for name in weights):
        return None
    if weights[0].endswith(".gguf"):
        return folder / weights[0]
    return folder if has_texts else None


def weights_in(folder: Path, model: HubModel) -> tuple[str, ...]:
    """Return the weight files of a snapshot. All parts of a model are named, whether they are there or not; nothing
    where the snapshot has no weights. Raises as `weights_of`."""
    there = [str(path.relative_to(folder)) for depth in ("*", "*/*") for path in folder.glob(f"{depth}.gguf")]
    if (folder / SINGLE).is_file():
        there.append(SINGLE)
    return weights_of(there, model, shards_of(folder / INDEX))


def weights_of(names: Collection[str], model: HubModel, shards: Collection[str] = ()) -> tuple[str, ...]:
    """Return the weight files to load, out of the names of a repository's files: safetensors before GGUF, unless the
    model's name asks for a GGUF file. `shards` are those of the index. Raises InvalidArgument where several GGUF models
    fit."""
    if not model.quant and (shards or SINGLE in names):
        return tuple(sorted(shards)) or (SINGLE,)
    fits = _fits(model.quant)
    models: dict[str, tuple[str, ...]] = {}
    for name in sorted(names):
        if _GGUF.fullmatch(name) and not name.rpartition("/")[2].startswith(_PROJECTOR) and fits.search(name):
            models.setdefault(_PART.sub("", name), _parts(name))
    if len(models) > 1:
        shown = ", ".join(list(models)[:_FEW]) + (", ..." if len(models) > _FEW else "")
        raise InvalidArgument(
            "SEVERAL_GGUF_MODELS",
            f"{model.repo} holds {len(models)} GGUF models: {shown}.",
            f"Say which after a colon, by the end of its name: {model.repo}:Q4_K_M.",
            param="model",
        )
    return next(iter(models.values()), ())


def shards_of(index: Path) -> tuple[str, ...]:
    """Return the files that an index of safetensors names; nothing where there is no index, or none that can be read:
    the worker says what is wrong with it. Names with a folder in them are left out."""
    try:
        if index.stat().st_size > _MOST_INDEX_BYTES:
            return ()
        places = json.loads(index.read_bytes())["weight_map"].values()
        return tuple(sorted({place for place in places if isinstance(place, str) and _SHARD.fullmatch(place)}))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return ()


def name_of(folder: Path) -> str:
    """Return the name of the model in a folder: `org/name` for a snapshot of the hub's cache, else the folder's."""
    if _COMMIT.fullmatch(folder.name) and folder.parent.name == "snapshots":
        kind, _, repo = folder.parent.parent.name.partition("--")
        if kind == "models" and repo:
            return repo.replace("--", "/", 1)
    return folder.name


def _expanded(place: str) -> Path:
    return Path(os.path.expandvars(place)).expanduser().absolute()


def _fits(quant: str) -> re.Pattern[str]:
    """Return what a file's name contains if it is of this block kind: Q4_K is not Q4_K_M."""
    return re.compile(rf"(?:^|[-._/]){re.escape(quant)}(?=[-./])" if quant else "", re.IGNORECASE)


def _parts(name: str) -> tuple[str, ...]:
    """Return all files of the GGUF model that a file belongs to, the first one first."""
    found = _PART.search(name)
    if found is None or not 0 < int(found[2]) <= 10_000:
        return (name,)
    return tuple(_PART.sub(f"-{number:05}-of-{found[2]}", name) for number in range(1, int(found[2]) + 1))
