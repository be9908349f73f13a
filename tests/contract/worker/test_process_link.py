"""A link starts its process again and again, whatever fails beside it."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import threading
from pathlib import Path

import pytest

from quire_worker.side_process import process_link
from quire_worker.side_process.frames import Frame, ProcessFrameKind
from quire_worker.side_process.process_link import LinkTimeouts, ProcessKind, ProcessLink, ProcessLost

WAIT_S = 60.0
QUICK = LinkTimeouts(first_backoff_s=0.01, max_backoff_s=0.01)


class Warnings:
    """Stands for the link's log: the text and the reason of each warning."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str]] = []

    def warning(self, text: str, *, reason: str, **_: object) -> None:
        self.seen.append((text, reason))


def await_lost_processes(kind: ProcessKind, processes: int) -> None:
    lost = threading.Semaphore(0)
    link = ProcessLink(kind, Frame(ProcessFrameKind.SETUP), {}, lost.release, QUICK)
    try:
        for _ in range(processes):
            assert lost.acquire(timeout=WAIT_S), "no process was started again"
            assert isinstance(link.take_frame(), ProcessLost)
    finally:
        link.close()


@pytest.mark.parametrize("buffers", [False, True])
def test_error_of_on_lost_does_not_end_restarts(buffers: bool) -> None:
    def fails() -> None:
        raise RuntimeError("nobody counts")

    command = ("true",)
    kind = ProcessKind("the helper", command, ProcessFrameKind, "helper-link", fails, buffers_while_restarting=buffers)
    await_lost_processes(kind, 3)


def test_error_of_a_socket_does_not_end_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    connect, calls = ProcessLink._connect, list[ProcessLink]()

    def fails_twice(link: ProcessLink) -> object:
        calls.append(link)
        if len(calls) in (2, 3):
            raise OSError("too many open files")
        return connect(link)

    monkeypatch.setattr(ProcessLink, "_connect", fails_twice)
    kind = ProcessKind(
        "the helper", ("true",), ProcessFrameKind, "helper-link", lambda: None, buffers_while_restarting=True
    )
    await_lost_processes(kind, 3)


def test_no_process_starts_without_the_frames_that_were_sent_since_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the first loss, no descriptor is left."""
    connect, spawn, calls = ProcessLink._connect, ProcessLink._spawn, list[ProcessLink]()
    accepted, started = {1: True}, list[int]()
    counted, lost_by = list[None](), list[int]()
    enough = threading.Event()

    def fails_once(link: ProcessLink) -> object:
        calls.append(link)
        if len(calls) == 2:
            raise OSError(errno.EMFILE, "too many open files")
        return connect(link)

    def record(link: ProcessLink, socket_fd: int) -> object:
        started.append(link._incarnation)
        return spawn(link, socket_fd)

    def on_frames() -> None:
        """Send a frame to the next process, as the matcher's client sends OPEN."""
        incarnation = len(accepted) + 1
        accepted[incarnation] = calls[0].send(incarnation, Frame(ProcessFrameKind.PING))
        lost_by.append(len(counted))
        if incarnation == 4:
            enough.set()

    monkeypatch.setattr(ProcessLink, "_connect", fails_once)
    monkeypatch.setattr(ProcessLink, "_spawn", record)
    monkeypatch.setattr(process_link, "log", warnings := Warnings())
    kind = ProcessKind(
        "the helper",
        ("true",),
        ProcessFrameKind,
        "helper-link",
        lambda: counted.append(None),
        buffers_while_restarting=True,
    )
    link = ProcessLink(kind, Frame(ProcessFrameKind.SETUP), {}, on_frames, QUICK)
    try:
        assert enough.wait(WAIT_S)
        assert [link.take_frame() for _ in range(3)] == [ProcessLost(), ProcessLost(had_process=False), ProcessLost()]
    finally:
        link.close()
    assert not accepted[2] and accepted[3]
    assert started[:2] == [1, 3], "the second incarnation's frames were refused"
    assert lost_by[:3] == [1, 1, 2], "no process was lost with the second incarnation"
    gone, no_socket, gone_again = warnings.seen[:3]
    assert gone[0] == gone_again[0] == "the helper's process is gone"
    assert no_socket == ("the helper's next process has no socket", "[Errno 24] too many open files")


def test_failed_start_is_reported_without_a_process() -> None:
    lost = threading.Semaphore(0)
    kind = ProcessKind("the helper", ("/nothing/here",), ProcessFrameKind, "helper-link", lambda: None)
    link = ProcessLink(kind, Frame(ProcessFrameKind.SETUP), {}, lost.release, QUICK)
    try:
        for _ in range(2):
            assert lost.acquire(timeout=WAIT_S)
            assert link.take_frame() == ProcessLost(had_process=False)
    finally:
        link.close()


def test_process_is_started_again_in_a_worker_with_many_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond descriptor 1023, `select` cannot wait."""
    eventfd = os.eventfd

    def high(value: int, flags: int) -> int:
        low = eventfd(value, flags)
        moved = fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, 1024)
        os.close(low)
        return moved

    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limits[1] != resource.RLIM_INFINITY and limits[1] < 2048:
        pytest.skip("the hard limit of open files is too low")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(limits[0], 2048), limits[1]))
    monkeypatch.setattr(os, "eventfd", high)
    try:
        await_lost_processes(ProcessKind("the helper", ("true",), ProcessFrameKind, "helper-link", lambda: None), 3)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_link_that_gets_no_thread_leaves_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_thread(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    before = sorted(Path("/proc/self/fd").iterdir())
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    kind = ProcessKind("the helper", ("true",), ProcessFrameKind, "helper-link", lambda: None)
    with pytest.raises(RuntimeError, match="thread"):
        ProcessLink(kind, Frame(ProcessFrameKind.SETUP), {}, lambda: None, QUICK)
    assert sorted(Path("/proc/self/fd").iterdir()) == before
