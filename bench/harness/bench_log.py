"""BenchLog: the bench log, with dated entries of a few lines. Each has the prediction, the result and the machine."""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

_WIDTH = 120
# A heading says what was measured; details follow it from the first of these on.
_TITLE_ENDS = re.compile(r": |; |, | \(")
_LEAST_TITLE, _MOST_TITLE = 12, 100


@dataclass(frozen=True)
class LogEntry:
    """One measurement. `what` names the benchmark, its arguments and what it compares."""

    what: str
    predicted: str
    result: str
    machine: str
    day: str = field(default_factory=lambda: date.today().isoformat())

    def text(self) -> str:
        """The entry as Markdown: a heading with the day, then a list."""
        title, details = _titled(" ".join(self.what.split()))
        lines = [("Predicted", self.predicted), ("Result", self.result), ("Machine", self.machine)]
        if details:
            lines.insert(0, ("Setup", details))
        body = "\n".join(_item(f"{name}: {' '.join(said.split())}") for name, said in lines)
        return f"### {self.day}: {title}\n\n{body}\n"


class BenchLog:
    """The file `path`, at whose end entries are added. Other processes may add entries at the same time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._written = ""

    def put(self, entry: LogEntry) -> None:
        """Write an entry in place of the one that this object wrote before. The file is replaced as a whole, so if the
        process is killed, the log has either the old or the new entry."""
        whole, text = self._path.read_text(), entry.text()
        at = whole.rfind(self._written) if self._written else -1
        head, tail = (f"{whole.rstrip()}\n\n", "") if at < 0 else (whole[:at], whole[at + len(self._written) :])
        self._written = text
        following = self._path.with_suffix(".next")
        following.write_text(head + text + tail)
        following.replace(self._path)


def read_entries(text: str) -> list[LogEntry]:
    """Return the entries of a log, in their order."""
    found = []
    for part in re.split(r"^### ", text, flags=re.MULTILINE)[1:]:
        heading, _, body = part.partition("\n")
        day, _, title = heading.partition(": ")
        items = re.split(r"^- (?=(?:Setup|Predicted|Result|Machine): )", body, flags=re.MULTILINE)[1:]
        said = {name: " ".join(rest.split()) for name, _, rest in (item.partition(": ") for item in items)}
        what = f"{title} {said['Setup']}" if "Setup" in said else title
        found.append(LogEntry(what, said["Predicted"], said["Result"], said["Machine"], day))
    return found


def _titled(what: str) -> tuple[str, str]:
    """Return the heading's text, and the details that follow it in the list."""
    if len(what) <= _MOST_TITLE:
        return what, ""
    for end in _TITLE_ENDS.finditer(what):
        inside_code = what[: end.start()].count("`") % 2
        if end.start() >= _LEAST_TITLE and not inside_code:
            if end.start() > _MOST_TITLE:
                break
            return what[: end.start()], what[end.start() :].lstrip(":;, ")
    return textwrap.shorten(what, _MOST_TITLE, placeholder=" ..."), what


def _item(text: str) -> str:
    return textwrap.fill(
        text, _WIDTH, initial_indent="- ", subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )
