"""The record of a run of the whole table, of which `python -m tools.fault_tolerance` makes the page for readers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.chaos.table.fault_table import GROUPS, Row
from tests.chaos.table.runner import Round, detection_p99, pause_p99

FILE = Path(__file__).resolve().parents[3] / "docs" / "fault-tolerance.json"


@dataclass(frozen=True)
class Line:
    """What came of all faults of one row. Seconds are those of the worst round."""

    fault: str
    faults: int
    answers: int
    errors: int
    wrong: int
    kept: int
    failed: int
    asked_again: int
    noticed_s: float
    pause_s: float
    back_s: float
    detected: bool


def line_of(row: Row, rounds: Sequence[Round]) -> Line:
    """Sum up the rounds of a row."""
    own = [one for one in rounds if one.row.name == row.name]
    return Line(
        fault=row.name,
        faults=len(own),
        answers=sum(one.answers for one in own),
        errors=sum(len(one.errors) for one in own),
        wrong=sum(len(one.wrong) for one in own),
        kept=sum(bool(one.leak) for one in own),
        failed=sum(bool(one.failure) for one in own),
        asked_again=sum(one.asked_again for one in own),
        noticed_s=round(max((one.noticed_s for one in own), default=0.0), 2),
        pause_s=round(max((one.pause_s for one in own), default=0.0), 2),
        back_s=round(max((one.back_s for one in own), default=0.0), 2),
        detected=row.detected,
    )


def write_record(rounds: Sequence[Round], seed: int, seconds: float, cores: int) -> None:
    """Write the file, with the rounds so far."""
    facts = {
        "seed": seed,
        "seconds": round(seconds),
        "cores": cores,
        "detection_p99_s": round(detection_p99(rounds), 2),
        "pause_p99_s": round(pause_p99(rounds), 2),
        "groups": {title: [asdict(line_of(row, rounds)) for row in rows] for title, rows in GROUPS.items()},
    }
    FILE.write_text(json.dumps(facts, indent=1) + "\n")
