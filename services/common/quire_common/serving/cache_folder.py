"""The cache folder for services, which import nothing else of the public package: see quire.cache_folder."""

from __future__ import annotations

from quire.cache_folder import cache_folder

__all__ = ["cache_folder"]
