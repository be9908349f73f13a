"""A tracer of all threads that records which lines run, and the share of given modules that it has seen."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

SERVICES = Path(__file__).resolve().parents[2] / "services"
_INSIDE = f"{SERVICES}/"


def record(reached: dict[str, set[int]]) -> None:
    """From now on, add the lines that run to `reached`, by file. Threads that run already are not seen."""

    def call(frame: FrameType, event: str, argument: object) -> Callable[..., Any] | None:
        name = frame.f_code.co_filename
        if not name.startswith(_INSIDE):
            return None
        lines = reached.setdefault(name, set())
        lines.add(frame.f_lineno)

        def line(inner: FrameType, event: str, argument: object) -> Any:
            lines.add(inner.f_lineno)
            return line

        return line

    threading.settrace(call)
    sys.settrace(call)


def lines_of(modules: tuple[str, ...], reached: dict[str, set[int]]) -> tuple[int, int]:
    """Return how many lines of modules and folders, relative to `services`, were reached, and how many there are."""
    sys.settrace(None)
    seen = total = 0
    for module in modules:
        path = SERVICES / module
        files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
        for file in files:
            there = set(_lines(compile(file.read_text(), str(file), "exec")))
            total += len(there)
            seen += len(there & reached.get(str(file), set()))
    return seen, total


def _lines(code: CodeType) -> Iterator[int]:
    yield from (line for _, _, line in code.co_lines() if line)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _lines(constant)
