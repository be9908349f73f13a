"""The kinds of worker that there are to test."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.exactness.subject import PacedSubject

if TYPE_CHECKING:
    from tests.exactness.subject import Subject

# Models of the CPU engine, and what makes them.
_MODELS = {"cpu": "tiny", "demo": "demo", "smollm2": "smollm2"}


def make_subject(kind: str) -> Subject:
    """By name; torch is imported only where it is needed."""
    if kind == "paced":
        return PacedSubject()
    if kind in _MODELS:
        from tests.exactness.cpu_subject import CpuSubject

        subject: Subject = getattr(CpuSubject, _MODELS[kind])()
        return subject
    raise ValueError(f"{kind} is none of paced, {', '.join(_MODELS)}")
