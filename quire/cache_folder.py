"""Where Quire keeps what it can make or fetch again: models, pages, compiled kernels."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder(name: str) -> Path:
    """Return a folder of the user's cache, or of QUIRE_CACHE_DIR where that is set. It need not exist."""
    override = os.environ.get("QUIRE_CACHE_DIR")
    if override:
        return Path(override).absolute() / name
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "quire" / name
