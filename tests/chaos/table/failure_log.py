"""FailureLog: when routers noticed that a scheduler, a worker or a tokenizer had failed, as their logs tell."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

_FAILURES = ("sequence lost its engine", "detokenize stream lost")


class FailureLog:
    """What the files get after this moment counts."""

    def __init__(self, files: Sequence[Path], ahead_s: float) -> None:
        """`ahead_s`: how far the clock of the logs is ahead of that of the moments."""
        self._files = {file: file.stat().st_size for file in files}
        self._ahead_s = ahead_s

    def last_s(self, moment: float, longest_s: float) -> float | None:
        """From the moment to the last failure that a router noticed within `longest_s`; None where none did."""
        found = [when - moment for file in self._files for when in self._times(file)]
        return max((after for after in found if 0.0 <= after <= longest_s), default=None)

    def _times(self, file: Path) -> list[float]:
        """The times of the failures in one file, by the monotonic clock."""
        lines = file.read_bytes()[self._files[file] :].decode(errors="replace").splitlines()
        failures = [
            json.loads(line) for line in lines if line.startswith("{") and any(failure in line for failure in _FAILURES)
        ]
        return [datetime.fromisoformat(line["time"]).timestamp() - self._ahead_s for line in failures]
