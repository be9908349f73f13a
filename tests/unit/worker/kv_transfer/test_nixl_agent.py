"""The life of a process's NIXL agent, with a stand-in for NIXL's own."""

from __future__ import annotations

import threading
from typing import cast

import pytest

from quire_worker.kv_transfer.ring import Ring
from quire_worker.kv_transfer.transports import nixl_agent
from quire_worker.kv_transfer.transports.nixl_agent import SharedNixlAgent

WAIT_S = 20.0


class Agent:
    """Stands for a NixlAgent."""

    made: list[Agent]

    def __init__(self, ring: Ring) -> None:
        self.closed = threading.Event()
        self.made.append(self)

    def close(self) -> None:
        assert not self.closed.is_set()
        self.closed.set()


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Agent]:
    """The agents that were made, in order."""
    Agent.made = []
    monkeypatch.setattr(nixl_agent, "NixlAgent", Agent)
    return Agent.made


def shared(idle_s: float) -> SharedNixlAgent:
    return SharedNixlAgent(cast(Ring, None), idle_s)


def test_agent_is_shared_and_closed_when_it_is_idle(made: list[Agent]) -> None:
    agents = shared(0.01)
    with agents.using() as first, agents.using() as second:
        assert first is second
    assert made[0].closed.wait(WAIT_S)
    with agents.using() as third:
        assert third is not first
    assert made[1].closed.wait(WAIT_S)


def test_agent_is_closed_at_once_if_no_thread_is_left_to_close_it(
    made: list[Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    agents = shared(WAIT_S)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Timer, "start", no_thread)
        with agents.using(), agents.using():
            pass
    assert made[0].closed.is_set()
    with agents.using():
        assert len(made) == 2
    with agents.using():
        assert len(made) == 2


def no_thread(*_: object) -> None:
    raise RuntimeError("can't start new thread")
