"""The folder in which Quire keeps files that it can make or download again: models, pages, compiled kernels."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder(name: str) -> Path:
    """Return the folder `name` in QUIRE_CACHE_DIR, or in the user's cache if that is not set. It may not exist yet."""
    override = os.environ.get("QUIRE_CACHE_DIR")
    if override:
        return Path(override).absolute() / name
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "quire" / name
