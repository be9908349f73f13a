"""Finding: the result of a check."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """`state`: ok, warning (Quire runs, with a restriction), failed (Quire does not run). `fix` is empty if all is
    well."""

    name: str
    state: str
    found: str
    fix: str = ""


def ok(name: str, found: str) -> Finding:
    """Return a finding without a problem."""
    return Finding(name, "ok", found)


def warning(name: str, found: str, fix: str) -> Finding:
    """Return a finding with which Quire runs, but with a restriction."""
    return Finding(name, "warning", found, fix)


def failed(name: str, found: str, fix: str) -> Finding:
    """Return a finding with which Quire does not run."""
    return Finding(name, "failed", found, fix)
