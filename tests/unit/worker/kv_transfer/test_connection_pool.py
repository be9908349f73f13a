"""Connections that one pull leaves to the next: whose they are, which are kept, and that all are closed in the end."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from quire_common.kv_data.connection import DataConnection
from quire_worker.kv_transfer.job_queue import Job
from quire_worker.kv_transfer.peers import pull_manager
from quire_worker.kv_transfer.peers.connection_pool import ConnectionPool
from quire_worker.kv_transfer.transports.data_link import DataLink
from quire_worker.kv_transfer.wire import AgentFrameKind
from quire_worker.side_process.frames import Frame
from tests.fakes.kv_transfer.agent_rig import load

WAIT_S = 10.0


class TransferHandlers:
    """Sockets, each with its other end here."""

    def __init__(self) -> None:
        self._others: list[socket.socket] = []

    def one(self, *, tunnelled: bool = False) -> DataConnection:
        ours, other = socket.socketpair()
        self._others.append(other)
        return DataConnection(ours, WAIT_S, tunnelled=tunnelled)

    def ended(self, number: int) -> bool:
        """Whether that connection has been closed, at last."""
        self._others[number].settimeout(WAIT_S)
        return self._others[number].recv(1) == b""

    def close(self) -> None:
        for other in self._others:
            other.close()


@pytest.fixture
def ends() -> Iterator[TransferHandlers]:
    made = TransferHandlers()
    yield made
    made.close()


def test_a_connection_is_the_next_ones_to_the_same_place_and_nobody_elses(ends: TransferHandlers) -> None:
    kept, connection = ConnectionPool(WAIT_S), ends.one()
    kept.put_connection("there", connection)
    assert kept.take_connection("elsewhere") is None
    assert kept.take_connection("there") is connection and kept.take_connection("there") is None
    connection.close()


def test_what_comes_over_a_network_or_beside_another_is_not_kept(ends: TransferHandlers) -> None:
    kept, first = ConnectionPool(WAIT_S), ends.one()
    kept.put_connection("there", first)
    kept.put_connection("there", ends.one())
    kept.put_connection("far", ends.one(tunnelled=True))
    assert ends.ended(1) and ends.ended(2) and kept.take_connection("far") is None
    assert kept.take_connection("there") is first
    first.close()


def test_one_that_nobody_takes_is_let_go(ends: TransferHandlers) -> None:
    kept = ConnectionPool(0.05)
    kept.put_connection("there", ends.one())
    assert ends.ended(0) and kept.take_connection("there") is None


def test_one_that_was_taken_in_time_is_left_alone(ends: TransferHandlers) -> None:
    kept, connection = ConnectionPool(0.05), ends.one()
    kept.put_connection("there", connection)
    assert kept.take_connection("there") is connection
    time.sleep(0.1)
    assert connection.sock.fileno() >= 0
    connection.close()


def test_in_the_end_all_are_closed_and_no_more_are_kept(ends: TransferHandlers) -> None:
    kept = ConnectionPool(WAIT_S)
    kept.put_connection("there", ends.one())
    kept.close()
    kept.put_connection("there", ends.one())
    assert ends.ended(0) and ends.ended(1) and kept.take_connection("there") is None


def test_one_that_was_cut_is_handed_to_nobody_and_closed(ends: TransferHandlers) -> None:
    link, connection = DataLink(), ends.one()
    link.adopt_connection("there", connection)
    link.abort()
    assert link.release_connection() is None and connection.sock.fileno() < 0


def test_a_pull_that_gets_no_thread_lets_its_connection_go(
    ends: TransferHandlers, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection, sent = ends.one(), list[Frame]()
    job = Job(load(1, 1, 11), 0, 0)
    monkeypatch.setattr(pull_manager, "Pull", lambda *_: SimpleNamespace(job=job, last_used="", close=connection.close))
    monkeypatch.setattr(threading, "Thread", no_thread)
    given: Any = SimpleNamespace(
        setup=SimpleNamespace(page_bytes=4096, load_slots=range(4), peer_hosts=""), send=sent.append
    )
    pull_manager.PullManager(given).start_job(job)
    assert [frame.kind for frame in sent] == [AgentFrameKind.ENDED] and connection.sock.fileno() < 0


def test_connection_is_not_kept_if_no_thread_is_left_to_close_it(
    ends: TransferHandlers, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, connection = ConnectionPool(WAIT_S), ends.one()
    monkeypatch.setattr(threading.Timer, "start", no_thread)
    kept.put_connection("there", connection)
    assert kept.take_connection("there") is None and connection.sock.fileno() < 0


def no_thread(*_: object, **__: object) -> None:
    raise RuntimeError("can't start new thread")
