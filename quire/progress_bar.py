"""Bars for `LLM` (prompts done, per second, tokens in and out; tqdm's own if the caller brings it) and for files."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any, Protocol

from quire.outputs import RequestOutput

_WIDTH = 24
_LEAST_GAP_S = 0.1


class Bar(Protocol):
    """What of tqdm is used."""

    def update(self, n: int) -> Any:
        """So many more are done."""

    def close(self) -> None:
        """No more will be."""


class TerminalBar:
    """On a terminal's standard error; nothing elsewhere."""

    def __init__(self, total: int, desc: str) -> None:
        self._total, self._desc = total, desc
        self._done = self._input = self._output = 0
        self._began = time.monotonic()
        self._drawn_s = 0.0
        self._shown = sys.stderr.isatty() and total > 0

    def count(self, output: RequestOutput) -> None:
        """Tokens of one that is done."""
        self._input += len(output.prompt_token_ids)
        self._output += sum(len(choice.token_ids) for choice in output.outputs)

    def update(self, n: int) -> None:
        """Count `n` more as done, and redraw the bar, but not too often."""
        self._done += n
        now_s = time.monotonic()
        if self._shown and (now_s - self._drawn_s >= _LEAST_GAP_S or self._done == self._total):
            self._drawn_s = now_s
            print(f"\r{self.line(now_s - self._began)}", end="", file=sys.stderr, flush=True)

    def close(self) -> None:
        if self._shown:
            print(file=sys.stderr)

    def line(self, seconds: float) -> str:
        """Return the bar as vLLM's users know it: share, count, and rates over `seconds`."""
        seconds = max(seconds, 1e-9)
        full = self._done * _WIDTH // max(self._total, 1)
        return (
            f"{self._desc}: {100 * self._done // max(self._total, 1):3d}%|{'█' * full}{' ' * (_WIDTH - full)}| "
            f"{self._done}/{self._total} [{seconds:.0f}s, {self._done / seconds:.2f} it/s, "
            f"in: {self._input / seconds:.0f} tok/s, out: {self._output / seconds:.0f} tok/s]"
        )


class ByteBar:
    """How far a file is, on a terminal's standard error; elsewhere one line that says what is being done."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._shown = sys.stderr.isatty()
        if not self._shown:
            print(what, file=sys.stderr, flush=True)

    def show(self, done: int, total: int) -> None:
        """Show that `done` of `total` bytes are there."""
        if self._shown:
            full = done * _WIDTH // max(total, 1)
            bar = f"{'█' * full}{' ' * (_WIDTH - full)}"
            print(f"\r{self._what}: |{bar}| {done / 1e6:.0f}/{total / 1e6:.0f} MB", end="", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Nothing more is to come."""
        if self._shown:
            print(file=sys.stderr)


def make_bar(use_tqdm: bool | Callable[..., Any], total: int) -> Bar | None:
    """Make a bar, or None for no bar. `use_tqdm` is as in vLLM: a switch, or a function that makes a bar
    (tqdm.tqdm)."""
    if callable(use_tqdm):
        bar: Bar = use_tqdm(total=total, desc="Processed prompts", dynamic_ncols=True)
        return bar
    return TerminalBar(total, "Processed prompts") if use_tqdm else None
