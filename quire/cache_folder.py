"""The folder in which Quire keeps files that it can make or download again: models, pages, compiled kernels."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder(name: str) -> Path:
    """Return the path of the folder `name` in QUIRE_CACHE_DIR. If that is not set, the folder is in `quire` in
    XDG_CACHE_HOME, or else in ~/.cache. Nothing is created."""
    override = os.environ.get("QUIRE_CACHE_DIR")
    if override:
        return Path(override).absolute() / name
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "quire" / name
