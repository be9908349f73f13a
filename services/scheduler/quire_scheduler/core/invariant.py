"""Invariants that hold under `python -O` too. For our own state only: what a user sent raises a typed error."""

from __future__ import annotations


def require(holds: bool, what: str) -> None:
    """Raise AssertionError where our own state contradicts itself."""
    if not holds:
        raise AssertionError(what)
