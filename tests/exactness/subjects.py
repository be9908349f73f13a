"""The kinds of worker that there are to test."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.exactness.subject import PacedSubject

if TYPE_CHECKING:
    from tests.exactness.subject import Subject

KINDS = ("paced", "cpu")


def make_subject(kind: str) -> Subject:
    """By name; torch is imported only where it is needed."""
    if kind == "paced":
        return PacedSubject()
    if kind in ("cpu", "demo"):
        from tests.exactness.cpu_subject import CpuSubject

        return CpuSubject.tiny() if kind == "cpu" else CpuSubject.demo()
    raise ValueError(f"{kind} is none of {KINDS} and demo")
