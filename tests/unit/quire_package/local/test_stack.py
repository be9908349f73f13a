"""LocalStack: what its start leaves of the log of another stack. Events come also if the log cannot be written."""

from __future__ import annotations

import errno
import io
import os
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest

from quire.errors import StartFailed
from quire.local import events
from quire.local.__main__ import emit
from quire.local.pids import ProcessId
from quire.local.spec import StackSpec
from quire.local.stack import LocalStack, _follow
from quire.local.state import StackState, StateDirectory


class RefusedSupervisor:
    """Stands for the process of a supervisor that fails at once, after a line in its log."""

    def __init__(self, command: object, *, stderr: io.FileIO, **more: Any) -> None:
        stderr.write(b"refused\n")
        self.stdin = io.StringIO()
        self.stdout = io.StringIO(
            events.encode(events.Failed("", "ALREADY_RUNNING", "It runs.", "Stop it.", "")) + "\n"
        )

    def poll(self) -> int:
        return 1

    def wait(self, timeout_s: float | None = None) -> int:
        return 1


@pytest.mark.parametrize("runs", [True, False])
def test_start_empties_the_log_only_of_a_stack_that_has_ended(
    runs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUIRE_STATE_DIR", str(tmp_path))
    monkeypatch.setattr(subprocess, "Popen", RefusedSupervisor)
    directory = StateDirectory("one")
    directory.create()
    me = ProcessId.of(os.getpid())
    supervisor = me if runs else ProcessId(me.pid, me.start_time + 1)
    directory.write(StackState("one", "id", "model", supervisor, phase="ready"))
    directory.log("supervisor").write_bytes(b"ready\n")
    with pytest.raises(StartFailed, match="It runs"):
        LocalStack(StackSpec("one", "model"))
    assert directory.log("supervisor").read_bytes() == (b"ready\nrefused\n" if runs else b"refused\n")


def test_event_reaches_its_reader_if_the_log_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class FullDisk(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    event = events.Restarted("worker", 1)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", FullDisk())
        emit(event)
    assert events.decode(capsys.readouterr().out) == event


def test_end_of_a_stack_is_noticed_if_its_events_cannot_be_shown() -> None:
    seen, ended = list[events.Event](), threading.Event()

    class Owner:
        def show(self, event: events.Event) -> None:
            seen.append(event)
            raise BrokenPipeError

    owner = Owner()
    told: list[events.Event] = [events.Died("worker", "KILLED", "It was killed.", "", ""), events.Stopped(1.0)]
    _follow(io.StringIO("".join(f"{events.encode(each)}\n" for each in told)), weakref.WeakMethod(owner.show), ended)
    assert seen == told and ended.is_set()
