"""What a check found."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """`state`: ok, warning (it will run, but), failed (it will not). `fix` is empty where all is well."""

    name: str
    state: str
    found: str
    fix: str = ""


def ok(name: str, found: str) -> Finding:
    """All is well."""
    return Finding(name, "ok", found)


def warning(name: str, found: str, fix: str) -> Finding:
    """It will run, but."""
    return Finding(name, "warning", found, fix)


def failed(name: str, found: str, fix: str) -> Finding:
    """It will not run."""
    return Finding(name, "failed", found, fix)
