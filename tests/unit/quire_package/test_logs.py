"""`quire logs`: how many lines are printed, and which of a log that changes."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from quire.cli import logs
from quire.local.state import StateDirectory


@pytest.mark.parametrize(("lines", "shown"), [("0", []), ("1", ["b"]), ("2", ["a", "b"]), ("9", ["a", "b"])])
def test_last_lines_are_printed(
    lines: str, shown: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("QUIRE_STATE_DIR", str(tmp_path))
    directory = StateDirectory()
    directory.create()
    directory.log("router").write_text("a\nb\n")
    parser = argparse.ArgumentParser()
    logs.add_arguments(parser)
    assert logs.run(parser.parse_args(["-n", lines])) == 0
    assert [line.split()[-1] for line in capsys.readouterr().out.splitlines()] == shown


def test_log_that_was_emptied_is_read_from_its_beginning(tmp_path: Path) -> None:
    log = tmp_path / "supervisor.log"
    tail = logs._Tail("supervisor", log)
    log.write_text("a long line of the earlier start\n")
    assert len(list(tail.read())) == 1
    log.write_text("new\n")
    assert list(tail.read()) == [("supervisor", "new")]
    assert list(tail.read()) == []
