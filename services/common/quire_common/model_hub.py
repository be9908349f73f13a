"""The model that a service's --model names: a path as it is, or a name of the Hugging Face hub as a path in its cache.

All services, and the package quire, resolve a name by quire.hub, so that they read the same files.
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
    """Do nothing: the default of `model_path`'s `progress`."""


def resolve_model(
    name: str,
    revision: str = "",
    download_dir: str = "",
    *,
    param: str = "model",
    tokenizer_only: bool = False,
    progress: Callable[[int, int], None] = _ignore_progress,
) -> str:
    """Return the path of a model: `name` itself where that is a path or of no hub's form, else the folder or GGUF file
    in the hub's cache, downloaded first where it is not there. `text_only`: weights are not needed. `progress` gets the
    bytes done and in all. Blocks. Raises ConfigError."""
    if not name or Path(name).exists():
        return name

    def start_progress() -> Callable[[int, int], None]:
        log.info("downloading", model=name, revision=revision or "main")
        progress(0, 0)
        return progress

    try:
        model = parse_hub_name(name, revision, download_dir)
        return name if model is None else str(find_hub_model(model, start_progress, tokenizer_only=tokenizer_only))
    except QuireError as error:
        raise ConfigError(error.code, error.message, error.fix, param=error.param or param) from error
