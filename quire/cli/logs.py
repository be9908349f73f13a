"""`quire logs`: prints the logs of the services for people, merged by time."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

from quire.cli.arguments import stack_arguments
from quire.cli.output.terminal import paint

HELP = "read the services' logs"
_POLL_S = 0.2
_SHOWN_APART = ("ts", "time", "timestamp", "level", "message", "msg", "event", "logger", "instance")
_STYLES = {"error": "red", "warning": "yellow", "critical": "red"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments: the service (default: all), the stack's name, the number of lines, --follow, and --raw."""
    parser.add_argument("service", nargs="?", help="a service, one of several (worker-2), or supervisor (default: all)")
    stack_arguments.add_name(parser)
    parser.add_argument("-n", "--lines", type=int, default=100, metavar="N", help="last lines (default: %(default)s)")
    parser.add_argument("-f", "--follow", action="store_true", help="go on until Ctrl-C")
    parser.add_argument("--raw", action="store_true", help="as they were written")


def run(args: argparse.Namespace) -> int:
    """Print the last --lines lines (0: none) of the services' logs together, merged by time (lines without a time
    first): those of one service or member if it is named, else of all and the supervisor. With --follow, print new
    lines as they come, until Ctrl-C, which passes on as KeyboardInterrupt. Raises InvalidArgument for an unknown
    service. The logs of a stack that has ended are read too; without any, nothing is printed. Returns exit code 0."""
    from quire.errors import InvalidArgument
    from quire.local.spec import SERVICES, service_of
    from quire.local.state import StateDirectory

    directory = StateDirectory(args.name)
    state = directory.read()
    known = (*(state.services if state is not None else SERVICES), "supervisor")
    names = [name for name in known if args.service in (None, name, service_of(name))]
    if not names:
        raise InvalidArgument("UNKNOWN_SERVICE", f"There is no {args.service!r}.", f"Choose of {', '.join(known)}.")
    tails = [_Tail(name, directory.log(name)) for name in names]
    lines = [(name, line) for tail in tails for name, line in tail.read()]
    lines.sort(key=lambda item: _time_of(item[1]))
    for name, line in lines[max(len(lines) - args.lines, 0) :]:
        print(_show(name, line, raw=args.raw))
    while args.follow:
        for tail in tails:
            for name, line in tail.read():
                print(_show(name, line, raw=args.raw), flush=True)
        time.sleep(_POLL_S)
    return 0


class _Tail:
    """A log file that grows. A new start of the stack replaces a service's log by a new file, and empties the
    supervisor's; a restarted service writes on in the same file."""

    def __init__(self, name: str, path: Path) -> None:
        self._name, self._path = name, path
        self._offset, self._file_id = 0, 0

    def read(self) -> Iterator[tuple[str, str]]:
        """Yield the service's name and each complete line that was written since the last call. A new file of the same
        name, or one that was cut and is shorter than before, is read from its beginning; the unread rest of the old one
        is lost. A missing file yields nothing."""
        try:
            with self._path.open("rb") as file:
                status = os.fstat(file.fileno())
                if status.st_ino != self._file_id or status.st_size < self._offset:
                    self._offset, self._file_id = 0, status.st_ino
                file.seek(self._offset)
                data = file.read()
        except OSError:
            return
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.decode("utf-8", "replace").splitlines():
            yield self._name, line


def _record(line: str) -> dict[str, object]:
    """Return the object that a line of JSON holds; empty if the line is something else."""
    try:
        record = json.loads(line) if line.startswith("{") else None
    except ValueError:
        record = None
    return record if isinstance(record, dict) else {}


def _time_of(line: str) -> float:
    """Return a line's time in seconds since the epoch; 0.0 for lines without a time, which therefore stay in front."""
    stamp = next((v for k, v in _record(line).items() if k in ("ts", "time", "timestamp")), None)
    if isinstance(stamp, int | float):
        return float(stamp)
    try:
        return datetime.datetime.fromisoformat(str(stamp)).timestamp()
    except ValueError:
        return 0.0


def _show(name: str, line: str, *, raw: bool) -> str:
    """Return a line for people: service, clock, level, message, then the other fields. With `raw`, or if the line is
    not JSON, it is the service's name and the unchanged line."""
    record = _record(line)
    prefix = paint(f"{name:<11}", "cyan")
    if raw or not record:
        return f"{prefix} {line}"
    level = str(record.get("level", "info")).lower()
    text = str(record.get("message") or record.get("msg") or record.get("event") or "")
    rest = " ".join(f"{k}={v}" for k, v in record.items() if k not in _SHOWN_APART and v not in ("", None, name))
    clock = time.strftime("%H:%M:%S", time.localtime(_time_of(line)))
    styled = paint(f"{level:<7}", _STYLES[level]) if level in _STYLES else f"{level:<7}"
    return f"{prefix} {clock} {styled} {text} {paint(rest, 'dim')}".rstrip()
