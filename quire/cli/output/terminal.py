"""Text for people: colours if the terminal has them, tables, bars, errors. It knows nothing of the content."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from typing import TextIO

from quire.errors import QuireError, StartFailed

_CODES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "cyan": "36"}
_EIGHTHS = " ▏▎▍▌▋▊▉█"


def paint(text: str, style: str, stream: TextIO | None = None) -> str:
    """Return the text in a style (a name of _CODES) if the stream is a terminal and NO_COLOR is not set; otherwise
    return it unchanged."""
    stream = sys.stdout if stream is None else stream
    if not stream.isatty() or "NO_COLOR" in os.environ:
        return text
    return f"\x1b[{_CODES[style]}m{text}\x1b[0m"


def bar(share: float, width: int = 24) -> str:
    """Return a bar of `width` characters, filled up to the share (0 to 1) in eighths of a character. Any share above 0
    is visible."""
    eighths = max(round(min(max(share, 0.0), 1.0) * width * 8), 1 if share > 0 else 0)
    full, part = divmod(eighths, 8)
    return ("█" * full + (_EIGHTHS[part] if part else "")).ljust(width)


def table(header: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> str:
    """Return a table with columns two spaces apart; those whose index is in `right` are aligned to the right."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        cells = [c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True))]
        return "  ".join(cells).rstrip()

    return "\n".join([line(header), *(line(row) for row in rows)])


def print_error(error: QuireError) -> None:
    """Print the error to standard error: the cause as the headline, then fix, code and request id, as far as they are
    known. A StartFailed has its service in the headline, if known, and only a StartFailed has a log, which comes
    last."""
    where = f"the {error.service} did not start: " if isinstance(error, StartFailed) and error.service else ""
    print(f"{paint('error:', 'red', sys.stderr)} {where}{error.message}", file=sys.stderr)
    lines = {"fix": error.fix, "code": error.code, "request": error.request_id}
    if isinstance(error, StartFailed):
        lines["log"] = error.log
    for name, value in lines.items():
        if value:
            print(f"  {name:<8}{value}", file=sys.stderr)


def refuse_rest(rest: Sequence[str], known: Iterable[str]) -> None:
    """Raise InvalidArgument for arguments that the parser did not know (`rest`), naming the first of them, with a guess
    at what was meant, among the `known` names and the engine's options. Does nothing if there are none."""
    if rest:
        from quire.engine_options import unknown_option

        spelled = rest[0].partition("=")[0]
        raise unknown_option(spelled.lstrip("-"), spelled, (name.replace("_", "-") for name in known))
