"""Recorder: the results of a stage. It writes a JSON line for each check to a file, and prints failures and a line for
each group.

The bench log has an entry from the first check on, which is rewritten after each check. So if a stage is killed, the
log has the checks until then, and says that the stage did not end.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from bench.harness.bench_log import BenchLog, LogEntry

Figure = float | int | str | bool | None
_TOLD = 400
"""Characters of what is told of a check that fails; the file has all."""


@dataclass
class Recorder:
    """Records checks and figures. A check is good, bad, or skipped with the reason. `out` is the file for JSON lines,
    and `log` is the bench log; None: the results are not written there."""

    stage: int
    machine: str
    out: Path | None = None
    log: BenchLog | None = None
    lines: list[dict[str, object]] = field(default_factory=list)
    _began: float = field(default_factory=time.perf_counter)
    _group: str = ""
    _ended: bool = False
    _cut: str = ""

    def __post_init__(self) -> None:
        if self.out is not None:
            self.out.write_text("")
        self._keep()

    def check(self, name: str, good: bool, **figures: Figure) -> None:
        """Record a condition that must hold."""
        self._add(name, "ok" if good else "FAILED", figures)

    def figure(self, name: str, **figures: Figure) -> None:
        """Record a measured figure."""
        self._add(name, "measured", figures)

    def skip(self, name: str, why: str) -> None:
        """Record a check that is not possible here."""
        self._add(name, "skipped", {"why": why})

    @contextlib.contextmanager
    def group(self, name: str) -> Iterator[None]:
        """Run a part of the stage. An error in it is a failed check, and the next part runs. An exception that ends the
        process is recorded in the log and raised again."""
        first, began, self._group = len(self.lines), time.perf_counter(), name
        try:
            with self.attempt(f"{name} ends"):
                yield
        except BaseException as error:
            self._cut = f"{type(error).__name__} {error}".strip()
            raise
        finally:
            told = _counted(self.lines[first:])
            print(f"{name}: {told}; {time.perf_counter() - began:.0f} s", flush=True)

    @contextlib.contextmanager
    def attempt(self, name: str) -> Iterator[None]:
        """Run code whose own error is a failed check of this name."""
        try:
            yield
        except Exception as error:
            self.check(name, False, error=f"{type(error).__name__}: {error}")
            sys.excepthook(type(error), error, error.__traceback__)

    def end(self) -> None:
        """End the stage, and print one line of JSON with its result."""
        self._ended = not self._cut
        self._keep()
        summary: dict[str, object] = {
            "stage": self.stage,
            "result": "ok" if self.good else "FAILED",
            **Counter(str(line["result"]) for line in self.lines),
            "failed": self.failed,
            "did_not_end": self._cut,
            "seconds": round(time.perf_counter() - self._began),
        }
        self._write(summary | {"entry": self.log_entry().text()})
        print(json.dumps(summary), flush=True)

    @property
    def good(self) -> bool:
        """Whether there were checks, none failed, and the stage was not interrupted."""
        return bool(self.lines) and not self.failed and not self._cut

    @property
    def failed(self) -> list[str]:
        """Return the names of the failed checks."""
        return [str(line["check"]) for line in self.lines if line["result"] == "FAILED"]

    def log_entry(self) -> LogEntry:
        """Return the bench log's entry."""
        told = [_counted(self.lines)]
        if not self._ended:
            told[0] += f", and it did not end ({self._cut or 'killed'} in {self._group or 'no part yet'})"
        if self.failed:
            told[0] += f" (failed: {', '.join(self.failed)})"
        told += [_spell(line) for line in self.lines if line["result"] == "measured"]
        told.append(f"{time.perf_counter() - self._began:.0f} s")
        return LogEntry(f"`make gpu-check STAGE={self.stage}`", "every check holds", "; ".join(told), self.machine)

    def _add(self, name: str, result: str, figures: dict[str, Figure]) -> None:
        line: dict[str, object] = {"stage": self.stage, "check": name, "result": result, **figures}
        self.lines.append(line)
        self._write(line | {"group": self._group})
        self._keep()
        if result == "FAILED":
            print(f"FAILED: {_spell(line)[:_TOLD]}", file=sys.stderr, flush=True)
        elif result == "measured":
            print(_spell(line)[:_TOLD], flush=True)

    def _keep(self) -> None:
        if self.log is not None:
            self.log.put(self.log_entry())

    def _write(self, line: dict[str, object]) -> None:
        if self.out is not None:
            with self.out.open("a") as file:
                print(json.dumps(line), file=file)


def _counted(lines: list[dict[str, object]]) -> str:
    count = Counter(line["result"] for line in lines)
    return f"{count['ok']} checks hold, {count['FAILED']} fail, {count['skipped']} skipped"


def _spell(line: dict[str, object]) -> str:
    figures = [f"{key} {_round(value)}" for key, value in line.items() if key not in ("stage", "check", "result")]
    return f"{line['check']}: {', '.join(figures)}"


def _round(value: object) -> object:
    return f"{value:.4g}" if isinstance(value, float) else value
