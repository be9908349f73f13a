"""Writes the table of docs/fault-tolerance.md: the faults that were tried, and their effects on clients.

`make chaos` writes docs/fault-tolerance.json. `python -m tools.fault_tolerance` makes the table from it. A test fails
if the table is out of date.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

_DOCS = Path(__file__).parent.parent / "docs"
DOCUMENT, RECORD = _DOCS / "fault-tolerance.md", _DOCS / "fault-tolerance.json"
_BEGIN, _END = "<!-- table: begin -->\n", "<!-- table: end -->\n"
_HEAD = (
    "| fault | times | answers | errors | wrong | kept | noticed after | longest pause | all returned after |\n"
    "|---|--:|--:|--:|--:|--:|--:|--:|--:|\n"
)


def table(record: dict[str, Any]) -> str:
    """Return the facts of a run, and one row for each kind of fault, in groups."""
    lines = [line for group in record["groups"].values() for line in group]
    names = ("faults", "answers", "errors", "wrong", "kept", "failed")
    total = {name: sum(line[name] for line in lines) for name in names}
    text = (
        f"The last run had {total['faults']} faults and {total['answers']:,} answers. The run took"
        f" {record['seconds'] / 60:.0f} minutes on {record['cores']} cores (`CHAOS_SEED={record['seed']}`).\n\n"
        f"Clients saw {total['errors']} errors and {total['wrong']} wrong answers.\n\n"
        "| result | value |\n|---|--:|\n"
        f"| faults that left pages, leases or a lost service behind (column *kept*) | {total['kept']} |\n"
        f"| faults at which the test itself failed | {total['failed']} |\n"
        f"| time until 99 % of the faults marked with `*` were noticed | {record['detection_p99_s']:.2f} s |\n"
        f"| time until all streams continued, for 99 % of all faults | {record['pause_p99_s']:.2f} s |\n"
    )
    for title, group in record["groups"].items():
        text += f"\n### {title[0].upper()}{title[1:]}\n\n{_HEAD}" + "".join(map(_row, group))
    return text


def document(page: str, record: dict[str, Any]) -> str:
    """Return the page with the table of this record."""
    before, _, rest = page.partition(_BEGIN)
    return before + _BEGIN + "\n" + table(record) + "\n" + _END + rest.partition(_END)[2]


def _row(line: dict[str, Any]) -> str:
    if not line["faults"]:
        return f"| {line['fault']} | 0 |" + " |" * 7 + "\n"
    counts = " | ".join(f"{line[name]:,}" for name in ("faults", "answers", "errors", "wrong", "kept"))
    noticed = f"{line['noticed_s']:.2f} s *" if line["detected"] else "-"
    return f"| {line['fault']} | {counts} | {noticed} | {line['pause_s']:.2f} s | {line['back_s']:.2f} s |\n"


def main() -> int:
    """Write the page."""
    DOCUMENT.write_text(document(DOCUMENT.read_text(), json.loads(RECORD.read_text())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
