"""Finds the reason for a service's end. It is the signal that killed the service, or else the typed error, the
traceback or the last line in its log."""

from __future__ import annotations

import json
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_TAIL_BYTES = 256 * 1024
_MAX_TEXT = 500


@dataclass(frozen=True)
class RootCause:
    """The reason for a service's end: a stable code, the cause, and a fix."""

    code: str
    message: str
    fix: str


def read_root_cause(log: Path, exit_code: int | None, log_start: int = 0) -> RootCause:
    """Find the reason for the end of a process. A signal that killed it comes first, then the typed error that it
    logged. Otherwise the last line of a logged traceback counts, and then the last line of its log that is not JSON. A
    logged INTERNAL error counts for nothing, since its traceback says more. Without any of these, the code is EXITED.
    `exit_code` is negative for a signal. The log before byte `log_start` belongs to an earlier process, and is not
    read."""
    lines = _last_log_lines(log, log_start)
    if exit_code is not None and exit_code < 0:
        return _signal_cause(-exit_code)
    records = [record for line in reversed(lines) if (record := _record(line))]
    # Every service's last line of a life that failed. A request's own error is logged otherwise.
    failure = next((r for r in records if r.get("message") == "failed" and r.get("code") and r.get("error")), None)
    if failure is not None and failure["code"] != "INTERNAL":
        return RootCause(str(failure["code"]), str(failure["error"]), str(failure.get("fix", "")))
    traceback = next((str(r["traceback"]).strip() for r in records if r.get("traceback")), "")
    if traceback:
        return RootCause("CRASHED", traceback.splitlines()[-1][:_MAX_TEXT], "See its log.")
    for line in reversed(lines):
        if line.strip() and not _record(line):
            return RootCause("CRASHED", line.strip()[:_MAX_TEXT], "See its log.")
    return RootCause("EXITED", f"It ended with exit code {exit_code} and said nothing.", "See its log.")


def _signal_cause(number: int) -> RootCause:
    """Return the cause KILLED for a process that this signal ended; for SIGKILL, the fix is to free memory."""
    if number == signal.SIGKILL:
        return RootCause(
            "KILLED", "It was killed by SIGKILL, as the kernel does when memory runs out.", "Free memory; see dmesg."
        )
    known = number in signal.Signals.__members__.values()  # real-time signals have no names
    name = signal.Signals(number).name if known else f"signal {number}"
    return RootCause("KILLED", f"It was killed by {name}.", "See its log.")


def _last_log_lines(log: Path, start: int) -> list[str]:
    """Return the lines of the last 256 KiB of the log, but none before byte `start`; empty if it cannot be read."""
    try:
        with log.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(start, file.tell() - _TAIL_BYTES))
            return file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return []


def _record(line: str) -> dict[str, Any]:
    """Parse a line as a JSON object; empty if it is none."""
    if not line.startswith("{"):
        return {}
    try:
        record = json.loads(line)
    except ValueError:
        return {}
    return record if isinstance(record, dict) else {}
