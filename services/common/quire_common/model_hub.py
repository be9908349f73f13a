"""Resolves the option --model of a service: a path stays as it is, a name of the Hugging Face hub becomes a path.

All services and the package quire resolve names by quire.hub, so that all of them read the same files.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from quire.errors import QuireError
from quire.hub.cache import model_name, parse_hub_name
from quire.hub.download import find_hub_model
from quire_common.errors import ConfigError
from quire_common.telemetry.logs import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["model_name", "resolve_model"]

log = get_logger(__name__)


def _ignore_progress(done_bytes: int, total_bytes: int) -> None:
    """Do nothing. This is the default of `resolve_model`'s `progress`."""


def resolve_model(
    name: str,
    revision: str = "",
    download_dir: str = "",
    *,
    param: str = "model",
    tokenizer_only: bool = False,
    progress: Callable[[int, int], None] = _ignore_progress,
) -> str:
    """Return the path of a model; blocks while it downloads. Raises ConfigError, with `param` as the option unless the
    fault is another one's (such as the revision's), if the revision is malformed, or the model cannot be found or
    downloaded.

    An existing path, one that cannot be looked up, or a text that is no name of the hub (also an empty one), is
    returned as it is. For a name of the hub, the result is the folder or GGUF file in the hub's cache. The model is
    downloaded first if files are missing. With `tokenizer_only`, no weights are needed beside config.json and
    tokenizer.json, unless the name asks for a quantisation. `progress` is called only if there is a download, which is
    logged: first with zeros, later with the bytes downloaded and the bytes in all.
    """
    try:
        if not name or Path(name).exists():
            return name
    except OSError:  # Whoever opens the path says why that fails.
        return name

    def start_progress() -> Callable[[int, int], None]:
        """Log that the download begins, report 0 of 0 bytes, and return `progress`."""
        log.info("downloading", model=name, revision=revision or "main")
        progress(0, 0)
        return progress

    try:
        model = parse_hub_name(name, revision, download_dir)
        return name if model is None else str(find_hub_model(model, start_progress, tokenizer_only=tokenizer_only))
    except QuireError as error:
        raise ConfigError(error.code, error.message, error.fix, param=error.param or param) from error
