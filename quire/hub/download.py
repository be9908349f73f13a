"""Downloads a model of the Hugging Face hub into the hub's cache: only the files that Quire reads, and no code.

The library huggingface_hub does the transfers, and itself reads HF_ENDPOINT, HF_TOKEN and HF_HUB_OFFLINE. This module
knows which files are needed, and in which order. `quire.hub.cache` knows where the files lie.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from quire.errors import NotFound, PermissionDenied, QuireError, Unavailable, Unsupported
from quire.hub.cache import (
    CONFIG_FILE,
    SHARD_INDEX_FILE,
    SINGLE_WEIGHT_FILE,
    TOKENIZER_FILE,
    HubModel,
    find_cached_model,
    read_shard_names,
    select_weight_files,
    snapshot_folder,
)
from quire.hub.download_progress import Progress, report_folder_growth

_METADATA_FILES = (
    TOKENIZER_FILE,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.json",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
    SHARD_INDEX_FILE,
)
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_MAX_CAUSE_CHARS = 300
_FIRST_REQUEST_TIMEOUT_S = 10.0
"""Limit of the first request. Without a limit, a firewall that drops packets would block a start for ever."""

StartProgress = Callable[[], Progress]
"""Called once, when a download begins. Returns the function that is called with its progress."""


def find_hub_model(model: HubModel, start_progress: StartProgress, *, tokenizer_only: bool = False) -> Path:
    """Return the folder or the GGUF file of a model of the hub. Download the model first if the cache lacks any file.
    `start_progress` is called when a download begins, and returns a function that is told the bytes downloaded and the
    bytes in all.

    A complete model in the cache is used without asking the hub, even if the hub has a newer one. `hf download` updates
    the cache. If the download fails with Unavailable, a cached folder with config.json and all safetensors is returned,
    unless the name asks for a quantisation; the tokenizer may be missing. `tokenizer_only` as in `find_cached_model`;
    such a folder then needs no weights.

    Raises NotFound for an unknown repository, revision or weight file, PermissionDenied for a gated repository, and
    Unsupported if no weights are in a known format. Raises InvalidArgument if several GGUF models match, and
    Unavailable if the model cannot be downloaded.
    """
    cached_path = find_cached_model(model, tokenizer_only=tokenizer_only)
    if cached_path is not None:
        return cached_path
    try:
        return _download(model, start_progress, tokenizer_only=tokenizer_only)
    except Unavailable:
        # The cache may hold a model without a tokenizer, if the user names another tokenizer. Otherwise the services
        # report the missing tokenizer better than this error.
        folder = snapshot_folder(model)
        has_config = folder is not None and (folder / CONFIG_FILE).is_file() and not model.quant
        if folder is not None and has_config and (tokenizer_only or _has_weights(folder)):
            return folder
        raise


def _has_weights(folder: Path) -> bool:
    """Whether the folder has all safetensors that its index names, or model.safetensors."""
    shards = read_shard_names(folder / SHARD_INDEX_FILE) or (SINGLE_WEIGHT_FILE,)
    return all((folder / name).is_file() for name in shards)


def _download(model: HubModel, start_progress: StartProgress, *, tokenizer_only: bool) -> Path:
    """Download the model's missing files into the hub's cache. Returns the snapshot's folder, or the GGUF file in it.
    config.json comes after the other metadata, and the weights last, so that a model whose weights are in the cache is
    complete. With `tokenizer_only`, weights are downloaded only if they are GGUF, and a repository without weights is
    enough if it has config.json and tokenizer.json, unless the name asks for a quantisation. The function of
    `start_progress` is told the bytes of weights downloaded and in all. Raises the errors of `_typed_errors`,
    `_no_weights_error` and `select_weight_files`."""
    with _typed_errors(model):
        try:
            from huggingface_hub import HfApi
        except ImportError as error:
            raise _not_fetched_error(model, "the package huggingface_hub is not installed") from error
        # This request comes first because it fails at once without a network. Transfers would retry for half a minute.
        api = HfApi(endpoint=_endpoint())
        info = api.model_info(
            model.repo, revision=model.revision, files_metadata=True, timeout=_FIRST_REQUEST_TIMEOUT_S
        )
        sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
        progress = start_progress()
        folder = _download_files(model, model.revision, _METADATA_FILES)
        commit = folder.name
        _download_files(model, commit, (CONFIG_FILE,))
        weight_files = select_weight_files(sizes, model, read_shard_names(folder / SHARD_INDEX_FILE))
        if tokenizer_only and not weight_files and find_cached_model(model, tokenizer_only=True) == folder:
            return folder
        absent_from_hub = [name for name in weight_files if name not in sizes]
        if absent_from_hub or not weight_files:
            raise _no_weights_error(model, sizes, absent_from_hub)
        if tokenizer_only and not weight_files[0].endswith(".gguf"):
            return folder
        to_download = [name for name in weight_files if not (folder / name).is_file()]
        total_bytes = sum(sizes[name] for name in to_download)
        progress(0, total_bytes)
        with report_folder_growth(model.repo_folder / "blobs", total_bytes, progress):
            _download_files(model, commit, to_download)
        progress(total_bytes, total_bytes)
    return folder / weight_files[0] if weight_files[0].endswith(".gguf") else folder


def _download_files(model: HubModel, revision: str, names: Sequence[str]) -> Path:
    """Download the files that match these names or patterns into the cache, unless they are there, and return the
    snapshot's folder."""
    from huggingface_hub import snapshot_download

    return Path(
        snapshot_download(
            model.repo,
            revision=revision,
            cache_dir=model.cache_dir,
            allow_patterns=list(names),
            endpoint=_endpoint(),
            tqdm_class=_silent_bar_class(),
        )
    )


def _endpoint() -> str | None:
    """Return the present HF_ENDPOINT. The library itself reads HF_ENDPOINT only once, when it is imported."""
    return os.environ.get("HF_ENDPOINT") or None


def _silent_bar_class() -> Any:
    """Return a class of progress bars that show nothing, for the library. The caller shows a bar of its own."""
    from tqdm.auto import tqdm

    class SilentBar(tqdm):  # type: ignore[misc]  # tqdm has no types
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **{**options, "disable": True})

    return SilentBar


@contextlib.contextmanager
def _typed_errors(model: HubModel) -> Iterator[None]:
    """Within the context, convert the library's errors to typed ones: a gated repository to PermissionDenied, an
    unknown repository or revision to NotFound, all others to Unavailable. A QuireError passes unchanged."""
    try:
        yield
    except QuireError:
        raise
    except Exception as error:
        from huggingface_hub import errors

        if isinstance(error, errors.GatedRepoError):
            raise PermissionDenied(
                "MODEL_GATED",
                f"The hub gives {model.repo} only to accounts that accepted its terms.",
                "Accept them on the model's page, and set HF_TOKEN to a token of that account.",
                param="model",
            ) from error
        if isinstance(error, errors.RepositoryNotFoundError):
            raise NotFound(
                "MODEL_NOT_FOUND",
                f"There is no folder or file {model.repo}, and the hub has no such model, or not for this token.",
                "Check the name; set HF_TOKEN for a private model.",
                param="model",
            ) from error
        if isinstance(error, errors.RevisionNotFoundError):
            raise NotFound(
                "REVISION_NOT_FOUND",
                f"The hub has no {model.repo} at revision {model.revision}.",
                "Give a branch, a tag or a commit of the model.",
                param="revision",
            ) from error
        raise _not_fetched_error(model, f"{type(error).__name__}: {error}") from error


def _not_fetched_error(model: HubModel, cause: str) -> Unavailable:
    """Return the error MODEL_NOT_FETCHED, for a model that is not complete in the cache and cannot be downloaded.
    Secrets in the cause are removed."""
    return Unavailable(
        "MODEL_NOT_FETCHED",
        f"There is no folder or file {model.repo}. The Hugging Face cache {model.cache_dir} does not have the whole "
        f"model at revision {model.revision}, and it cannot be downloaded: {_redact(cause)}.",
        f"Where there is a network, run `{model.download_command}`; or name a model's folder or GGUF file.",
        param="model",
    )


def _redact(cause: str) -> str:
    """Return the cause as one line of at most 300 characters. User names, passwords and query strings (signatures) are
    removed from URLs."""
    redacted = re.sub(r"\?[^\s'\"]*", "", re.sub(r"//[^/@\s]*@", "//", cause))
    return " ".join(redacted.split())[:_MAX_CAUSE_CHARS]


def _no_weights_error(
    model: HubModel, names: Sequence[str] | dict[str, int], absent_from_hub: Sequence[str]
) -> QuireError:
    """Return the error for a repository without weights that Quire reads: NotFound if the hub lacks a file of the index
    or a part of a GGUF file, else Unsupported. The latter tells of a pickle file, if there is one."""
    if absent_from_hub:
        return NotFound(
            "MISSING_SHARD",
            f"The hub's {model.repo} at revision {model.revision} lacks its weight file {absent_from_hub[0]}.",
            "Give another revision.",
            param="revision",
        )
    format_name = f"GGUF file of kind {model.quant}" if model.quant else "safetensors or GGUF file"
    pickles = sorted(name for name in names if name.endswith(_PICKLE_SUFFIXES))
    pickle_note = f" It holds {pickles[0]}, a format that can execute code." if pickles else ""
    return Unsupported(
        "UNSUPPORTED_WEIGHT_FORMAT",
        f"The hub's {model.repo} at revision {model.revision} has no {format_name}.{pickle_note}",
        "Name a model that has one.",
        param="model",
    )
