"""Stage 1's run of the kernels' tests: every file has its turn, what fails is told, and nothing outlives the stage."""

from __future__ import annotations

import signal
from contextlib import ExitStack
from pathlib import Path
from subprocess import Popen
from typing import IO

import pytest

from bench.gpu.record import Recorder
from tests.gpu import kernels


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(kernels, "_FOLDER", tmp_path)
    monkeypatch.setattr(kernels, "ROOT", tmp_path)
    monkeypatch.setattr(kernels, "_MOST_PROCESSES", 2)
    return tmp_path


def test_every_file_has_its_turn_and_failures_are_told(folder: Path) -> None:
    (folder / "part").mkdir()
    for name, place in (("a", folder), ("b", folder), ("c", folder / "part")):
        (place / f"test_{name}.py").write_text(f"def test_{name}() -> None:\n    assert {name!r} != 'b'\n")
    recorder = Recorder(1, "a machine")
    kernels.run(recorder, tiny=False)
    by_result = {str(line["result"]): line for line in recorder.lines}
    assert set(by_result) == {"ok", "FAILED"} and "FAILED test_b.py::test_b" in str(by_result["FAILED"]["failed"])
    assert "2 passed" in str(by_result["ok"]["told"]) and "1 failed" in str(by_result["FAILED"]["told"])


def test_what_does_not_end_fails(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "test_long.py").write_text("import time\n\ndef test_long() -> None:\n    time.sleep(60)\n")
    monkeypatch.setattr(kernels, "_LIMIT_S", 0)
    recorder = Recorder(1, "a machine")
    kernels.run(recorder, tiny=False)
    assert "unit tests of kernels, 1 of 2" in recorder.failed


@pytest.mark.deep
def test_a_stage_that_is_ended_leaves_no_process(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The longest file is waited for first."""
    (folder / "test_short.py").write_text("def test_short() -> None:\n    pass\n" + 20 * "# long\n")
    (folder / "test_long.py").write_text("import time\n\ndef test_long() -> None:\n    time.sleep(60)\n")
    processes: list[Popen[str]] = []

    def start(files: list[Path], stack: ExitStack) -> tuple[Popen[str], IO[str]]:
        started = begin(files, stack)
        processes.append(started[0])
        return started

    def terminated(*_: object, **__: object) -> None:
        raise SystemExit(143)

    begin = kernels._start
    monkeypatch.setattr(kernels, "_start", start)
    recorder = Recorder(1, "a machine")
    monkeypatch.setattr(recorder, "check", terminated)
    with pytest.raises(SystemExit):
        kernels.run(recorder, tiny=False)
    assert [process.returncode for process in processes] == [0, -signal.SIGKILL]
