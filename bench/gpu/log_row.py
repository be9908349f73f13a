"""LogRow: a row of the bench log that is written as often as there is more to say, at one place."""

from __future__ import annotations

from pathlib import Path

_RECENT = 100
"""Rows from the end among which the last one put is looked for."""


class LogRow:
    """Of the file `log`, at whose end it begins. Others may add rows meanwhile."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._written = ""

    def put(self, row: str) -> None:
        """Write the row, in the place of what was put before. Whoever kills the process leaves the one or the other."""
        lines = self._log.read_text().splitlines()
        if self._written and self._written in lines[-_RECENT:]:
            at = len(lines) - 1 - lines[::-1].index(self._written)
            lines[at] = row
        else:
            lines.append(row)
        self._written = row
        whole = self._log.with_suffix(".next")
        whole.write_text("\n".join(lines) + "\n")
        whole.replace(self._log)
