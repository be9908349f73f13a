"""A stranger who follows a prompt through the code opens few files, and docs/architecture.md names them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tools import request_walk
from tools.request_walk import Call, calls_of, on_the_way, out_and_back

ROOT = Path(__file__).resolve().parents[3]
MOST_OUT, MOST_NEW_BACK = 40, 20


@pytest.mark.deep
def test_the_way_of_a_request_is_short_and_documented(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_STATE_DIR", str(tmp_path))
    out, back = request_walk.walk(request_walk.trace(3))
    files_out, files_back = ({file for _, file, _ in way} for way in (out, back))
    assert 20 < len(files_out) <= MOST_OUT and 10 < len(files_back - files_out) <= MOST_NEW_BACK
    section = (
        (ROOT / "docs" / "architecture.md").read_text().split("## The files that a request passes")[1].split("\n## ")[0]
    )
    named = set(re.findall(r"`((?:services|quire)/[\w/]+\.py)`", section))
    assert files_out | files_back <= named, "python -m tools.request_walk prints the tables for docs/architecture.md"


def test_a_file_is_on_the_way_if_it_is_on_the_stack_of_a_hand_over() -> None:
    rows = [
        (1, "router", 7, "a.py", "outer", False),
        (2, "router", 7, "check.py", "check", False),
        (3, "router", 7, "check.py", "check", True),
        (4, "router", 8, "other.py", "beside", False),
        (5, "router", 7, "b.py", "hand", False),
        (6, "router", 7, "b.py", "hand", True),
        (7, "router", 7, "a.py", "outer", True),
        (8, "worker", 7, "c.py", "StepRunner.run", False),
        (9, "worker", 7, "c.py", "StepRunner.run", True),
        (10, "worker", 7, "d.py", "after", False),
    ]
    calls = calls_of(rows)
    out, back = out_and_back(calls, 0, 20)
    assert [file for _, file, _ in on_the_way(out, ("hand", "StepRunner.run"))] == ["a.py", "b.py", "c.py"]
    assert [call.file for call in back] == ["d.py"]
    with pytest.raises(ValueError, match="were not called: gone"):
        on_the_way(out, ("hand", "gone"))
    with pytest.raises(ValueError, match="no step"):
        out_and_back([Call(1, "router", "hand", ("b.py",), 2)], 0, 20)
