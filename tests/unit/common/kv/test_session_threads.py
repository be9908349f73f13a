"""Threads of sessions: a port may close while one of them begins."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from quire_common.kv_data.session_threads import SessionThreads


class Session:
    busy = False
    authenticated = False

    def __init__(self) -> None:
        self.stopped = False

    def run(self) -> None:
        assert self.stopped

    def stop(self) -> None:
        self.stopped = True

    abandon = stop


def test_close_while_a_thread_is_about_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    sessions = SessionThreads(2, "test")

    class LateThread(threading.Thread):
        def start(self) -> None:
            sessions.close(5)
            super().start()

    monkeypatch.setattr(threading, "Thread", LateThread)
    session: Any = Session()
    refused: list[str] = []
    ended = threading.Event()
    sessions.begin(session, refused.append, ended.set)
    assert ended.wait(5) and session.stopped and not refused
