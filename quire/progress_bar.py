"""Progress bars for `LLM` (prompts done, per second, tokens in and out) and for files. `LLM` uses tqdm instead if the
caller passes it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any, Protocol

from quire.outputs import RequestOutput

_WIDTH = 24
_LEAST_GAP_S = 0.1


class Bar(Protocol):
    """The part of tqdm's interface that is used."""

    def update(self, n: int) -> Any:
        """Count `n` more items as done."""

    def close(self) -> None:
        """Close the bar."""


class TerminalBar:
    """Shows its bar if standard error is a terminal, and nothing otherwise or for no prompts."""

    def __init__(self, total: int, desc: str) -> None:
        self._total, self._desc = total, desc
        self._done = self._input = self._output = 0
        self._began = time.monotonic()
        self._drawn_s = 0.0
        self._shown = sys.stderr.isatty() and total > 0

    def count(self, output: RequestOutput) -> None:
        """Add the tokens of a completed prompt, input and output, to the counts that the bar shows."""
        self._input += len(output.prompt_token_ids)
        self._output += sum(len(choice.token_ids) for choice in output.outputs)

    def update(self, n: int) -> None:
        """Count `n` more prompts as done. On a terminal, redraw the bar, at most every 0.1 s, and always when all are
        done."""
        self._done += n
        now_s = time.monotonic()
        if self._shown and (now_s - self._drawn_s >= _LEAST_GAP_S or self._done == self._total):
            self._drawn_s = now_s
            print(f"\r{self.line(now_s - self._began)}", end="", file=sys.stderr, flush=True)

    def close(self) -> None:
        if self._shown:
            print(file=sys.stderr)

    def line(self, seconds: float) -> str:
        """Return the bar's text in vLLM's form: share, count, prompts per second, and tokens in and out per second.
        `seconds` is the time since the start."""
        seconds = max(seconds, 1e-9)
        full = self._done * _WIDTH // max(self._total, 1)
        return (
            f"{self._desc}: {100 * self._done // max(self._total, 1):3d}%|{'█' * full}{' ' * (_WIDTH - full)}| "
            f"{self._done}/{self._total} [{seconds:.0f}s, {self._done / seconds:.2f} it/s, "
            f"in: {self._input / seconds:.0f} tok/s, out: {self._output / seconds:.0f} tok/s]"
        )


class ByteBar:
    """Shows the progress of a file if standard error is a terminal; otherwise prints one line that says what is
    done."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._shown = sys.stderr.isatty()
        if not self._shown:
            print(what, file=sys.stderr, flush=True)

    def show(self, done: int, total: int) -> None:
        """Redraw the bar for `done` of `total` bytes, in MB. Does nothing unless standard error is a terminal."""
        if self._shown:
            full = done * _WIDTH // max(total, 1)
            bar = f"{'█' * full}{' ' * (_WIDTH - full)}"
            print(f"\r{self._what}: |{bar}| {done / 1e6:.0f}/{total / 1e6:.0f} MB", end="", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Close the bar."""
        if self._shown:
            print(file=sys.stderr)


def make_bar(use_tqdm: bool | Callable[..., Any], total: int) -> Bar | None:
    """Return a bar for `total` prompts. `use_tqdm` is as in vLLM: True for Quire's own bar, False for no bar (the
    result is None), or a function that makes a bar (tqdm.tqdm)."""
    if callable(use_tqdm):
        bar: Bar = use_tqdm(total=total, desc="Processed prompts", dynamic_ncols=True)
        return bar
    return TerminalBar(total, "Processed prompts") if use_tqdm else None
