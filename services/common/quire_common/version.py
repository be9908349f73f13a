"""Which version of a distribution runs."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

FROM_SOURCE = "0+source"


def installed_version(distribution: str) -> str:
    """Return the version of a distribution; FROM_SOURCE where it runs from a checkout that is not installed."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return FROM_SOURCE
