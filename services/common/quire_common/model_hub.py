"""The model that a service's --model names: a path as it is, or a name of the Hugging Face hub as a path in its cache.

All services, and the package quire, resolve a name by quire.hub, so that they read the same files.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from quire.errors import QuireError
from quire.hub.cache import hub_model, name_of
from quire.hub.download import find_hub_model
from quire_common.errors import ConfigError
from quire_common.telemetry.logs import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["model_path", "name_of"]

log = get_logger(__name__)


def _ignore(done_bytes: int, total_bytes: int) -> None:
    """Do nothing: the default of `model_path`'s `progress`."""


def model_path(
    name: str,
    revision: str = "",
    download_dir: str = "",
    *,
    param: str = "model",
    text_only: bool = False,
    progress: Callable[[int, int], None] = _ignore,
) -> str:
    """Return the path of a model: `name` itself where that is a path or of no hub's form, else the folder or GGUF file
    in the hub's cache, downloaded first where it is not there. `text_only`: weights are not needed. `progress` gets the
    bytes done and in all. Blocks. Raises ConfigError."""
    if not name or Path(name).exists():
        return name

    def announce() -> Callable[[int, int], None]:
        log.info("downloading", model=name, revision=revision or "main")
        progress(0, 0)
        return progress

    try:
        model = hub_model(name, revision, download_dir)
        return name if model is None else str(find_hub_model(model, announce, text_only=text_only))
    except QuireError as error:
        raise ConfigError(error.code, error.message, error.fix, param=error.param or param) from error
