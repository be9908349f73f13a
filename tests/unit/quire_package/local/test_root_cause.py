from __future__ import annotations

import json
from pathlib import Path

import pytest

from quire.local.root_cause import read_root_cause

READY = json.dumps({"level": "info", "message": "ready"})
REQUEST_ERROR = json.dumps({"level": "error", "message": "request failed", "code": "BAD", "error": "no", "fix": "x"})
FAILED = json.dumps({"level": "error", "message": "failed", "code": "NO_MODEL", "error": "gone", "fix": "find it"})
INTERNAL = json.dumps({"level": "error", "message": "failed", "code": "INTERNAL", "error": "?", "fix": "?"})
TRACE = json.dumps({"level": "error", "message": "start failed", "traceback": "Traceback\n  x\nKeyError: 'q'\n"})

CASES = [
    ("typed", [READY, FAILED], 2, "NO_MODEL", "gone"),
    ("typed, then noise", [FAILED, "[mutex] shutting down"], 2, "NO_MODEL", "gone"),
    (
        "a request's error is no cause of death",
        [FAILED.replace("failed", "other"), REQUEST_ERROR, "oops"],
        1,
        "CRASHED",
        "oops",
    ),
    ("an untyped exception at start", [TRACE, INTERNAL], 2, "CRASHED", "KeyError: 'q'"),
    (
        "last words",
        [READY, "Traceback", "ModuleNotFoundError: No module named 'x'"],
        1,
        "CRASHED",
        "ModuleNotFoundError",
    ),
    ("killed", [REQUEST_ERROR, "words"], -9, "KILLED", "SIGKILL"),
    ("a signal without a name", [READY], -40, "KILLED", "signal 40"),
    ("segmentation fault", [READY], -11, "KILLED", "SIGSEGV"),
    ("silence", [READY], 7, "EXITED", "exit code 7"),
    ("nothing at all", [], 1, "EXITED", "exit code 1"),
    ("broken JSON", ['{"message": "failed", "code": '], 1, "CRASHED", '{"message"'),
]


@pytest.mark.parametrize(
    ("lines", "exit_code", "code", "message"), [case[1:] for case in CASES], ids=[c[0] for c in CASES]
)
def test_root_cause(tmp_path: Path, lines: list[str], exit_code: int, code: str, message: str) -> None:
    log = tmp_path / "service.log"
    log.write_text("".join(line + "\n" for line in lines))
    cause = read_root_cause(log, exit_code)
    assert cause.code == code
    assert message in cause.message
    assert cause.fix


def test_what_another_process_wrote_before_is_not_its_cause(tmp_path: Path) -> None:
    log = tmp_path / "service.log"
    log.write_text(FAILED + "\n")
    start = log.stat().st_size
    assert read_root_cause(log, 1, start).code == "EXITED"
    with log.open("a") as file:
        file.write(FAILED.replace("NO_MODEL", "OTHER") + "\n")
    assert read_root_cause(log, 1, start).code == "OTHER"


def test_a_log_that_is_not_there(tmp_path: Path) -> None:
    assert read_root_cause(tmp_path / "none.log", 1).code == "EXITED"


def test_only_the_end_of_a_long_log_is_read(tmp_path: Path) -> None:
    log = tmp_path / "service.log"
    with log.open("w") as file:
        file.write((READY + "\n") * 50_000)
        file.write(FAILED + "\n")
    assert read_root_cause(log, 2).code == "NO_MODEL"
