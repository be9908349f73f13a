"""Recorder: what a stage found, as JSON lines while it runs and as one row of the bench log at its end."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

Figure = float | int | str | bool | None


@dataclass
class Recorder:
    """A check is good, bad, or skipped with the reason; figures go beside."""

    stage: int
    machine: str
    lines: list[dict[str, object]] = field(default_factory=list)
    _began: float = field(default_factory=time.perf_counter)

    def check(self, name: str, good: bool, **figures: Figure) -> None:
        """Something that must hold."""
        self._add(name, "ok" if good else "FAILED", figures)

    def figure(self, name: str, **figures: Figure) -> None:
        """Something that was measured."""
        self._add(name, "measured", figures)

    def skip(self, name: str, why: str) -> None:
        """Something that cannot be done here."""
        self._add(name, "skipped", {"why": why})

    @property
    def good(self) -> bool:
        """Whether nothing failed."""
        return not self.failed

    @property
    def failed(self) -> list[str]:
        """Names of what failed."""
        return [str(line["check"]) for line in self.lines if line["result"] == "FAILED"]

    def log_row(self) -> str:
        """The bench log's row."""
        count = {kind: sum(line["result"] == kind for line in self.lines) for kind in ("ok", "FAILED", "skipped")}
        told = f"{count['ok']} checks hold, {count['FAILED']} fail, {count['skipped']} skipped"
        failed = f" (failed: {', '.join(self.failed)})" if self.failed else ""
        figures = "; ".join(_spell(line) for line in self.lines if line["result"] == "measured")
        took = time.perf_counter() - self._began
        text = f"{told}{failed}{'; ' + figures if figures else ''}; {took:.0f} s"
        cells = (
            date.today().isoformat(),
            f"`make gpu-check STAGE={self.stage}`",
            "every check holds",
            text,
            self.machine,
        )
        return f"| {' | '.join(cells)} |"

    def append_to(self, log: Path) -> None:
        """Add the row at the end."""
        text = log.read_text()
        log.write_text(f"{text}{'' if text.endswith(chr(10)) else chr(10)}{self.log_row()}\n")

    def _add(self, name: str, result: str, figures: dict[str, Figure]) -> None:
        line: dict[str, object] = {"stage": self.stage, "check": name, "result": result, **figures}
        self.lines.append(line)
        print(json.dumps(line), flush=True)
        if result == "FAILED":
            print(f"FAILED: {name}", file=sys.stderr, flush=True)


def _spell(line: dict[str, object]) -> str:
    figures = [f"{key} {_round(value)}" for key, value in line.items() if key not in ("stage", "check", "result")]
    return f"{line['check']}: {', '.join(figures)}"


def _round(value: object) -> object:
    return f"{value:.4g}" if isinstance(value, float) else value
