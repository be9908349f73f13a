"""A KV transfer agent that is made when it is needed, and several as one."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from bench.harness.plain_pages import ids
from quire_common.credit import MoveKind, PageMove
from quire_worker.engine.transfer_agent import KvTransferAgent, MoveResult, NoTransferAgent
from quire_worker.kv_transfer.composite_agents import MAX_WAITING, AgentOnDemand, AgentsByKind
from tests.fakes.kv_transfer.fake_transfer_agent import FakeTransferAgent

WAIT_S = 30.0


def a_move(move_id: int, kind: MoveKind = MoveKind.EXPORT) -> PageMove:
    return PageMove(move_id, kind, 0, ids(1, 2), (b"a" * 32, b"b" * 32))


class Maker:
    """Makes a FakeMover when the test lets it."""

    def __init__(self, makes: Callable[[], KvTransferAgent] = FakeTransferAgent) -> None:
        self.made: list[KvTransferAgent] = []
        self.may = threading.Event()
        self.woken = threading.Event()
        self.transfer_agent = AgentOnDemand(self._make)
        self.transfer_agent.wake = self.woken.set
        self._makes = makes

    def let(self) -> None:
        self.may.set()
        assert self.woken.wait(WAIT_S)

    def _make(self) -> KvTransferAgent:
        assert self.may.wait(WAIT_S)
        self.made.append(self._makes())
        return self.made[-1]


def test_nothing_is_made_for_nobody() -> None:
    maker = Maker()
    maker.transfer_agent.cancel_all()
    assert maker.transfer_agent.take_results() == []
    maker.transfer_agent.close()
    assert maker.made == []


def test_it_is_made_once_ahead_of_the_first_move_where_moves_are_expected() -> None:
    maker = Maker()
    maker.transfer_agent.begin()
    maker.transfer_agent.begin()
    maker.let()
    assert len(maker.made) == 1 and maker.transfer_agent.take_results() == []
    assert maker.transfer_agent.submit(a_move(1))
    (made,) = maker.made
    assert isinstance(made, FakeTransferAgent) and list(made.taken) == [1], "it need not wait"
    maker.transfer_agent.close()
    maker.transfer_agent.begin()
    assert len(maker.made) == 1


def test_moves_and_offers_wait_until_it_is_there() -> None:
    maker = Maker()
    assert maker.transfer_agent.submit(a_move(1)) and maker.transfer_agent.submit(a_move(2))
    assert not maker.transfer_agent.submit(a_move(1))
    maker.transfer_agent.offer_pages(1, 2)
    assert maker.transfer_agent.take_results() == []
    maker.let()
    assert maker.transfer_agent.take_results() == []
    (made,) = maker.made
    assert isinstance(made, FakeTransferAgent) and list(made.taken) == [1, 2] and made.offered == {1: 2}
    assert made.wake == maker.transfer_agent.wake
    assert maker.transfer_agent.submit(a_move(3))
    maker.transfer_agent.offer_pages(2, 1)
    made.end(3)
    maker.transfer_agent.end_move(2)
    assert {result.id: result.ok for result in maker.transfer_agent.take_results()} == {3: True, 2: False}
    assert made.offered == {1: 2, 2: 1} and len(maker.made) == 1
    maker.transfer_agent.close()
    assert made.cancelled == 1


def test_moves_that_end_before_it_is_there_are_told_of_once_and_never_begun() -> None:
    maker = Maker()
    assert maker.transfer_agent.submit(a_move(1)) and maker.transfer_agent.submit(a_move(2))
    maker.transfer_agent.end_move(1)
    maker.transfer_agent.end_move(1)
    assert maker.transfer_agent.take_results() == [MoveResult(1, ok=False, pages=0, us=0)]
    maker.transfer_agent.cancel_all()
    maker.transfer_agent.submit(a_move(3))
    maker.let()
    assert maker.transfer_agent.take_results() == []
    (made,) = maker.made
    assert isinstance(made, FakeTransferAgent) and list(made.taken) == [3]
    maker.transfer_agent.close()


def test_offer_of_a_move_that_ended_while_it_waited_is_forgotten() -> None:
    maker = Maker()
    assert maker.transfer_agent.submit(a_move(1))
    maker.transfer_agent.offer_pages(1, 2)
    maker.transfer_agent.offer_pages(2, 2)
    maker.transfer_agent.end_move(1)
    maker.transfer_agent.offer_pages(1, 2)
    assert maker.transfer_agent.submit(a_move(1)) and maker.transfer_agent.submit(a_move(2))
    maker.let()
    assert maker.transfer_agent.take_results() == [MoveResult(1, ok=False, pages=0, us=0)]
    (made,) = maker.made
    assert isinstance(made, FakeTransferAgent) and list(made.taken) == [1, 2] and made.offered == {}
    maker.transfer_agent.close()


@pytest.mark.parametrize("begun", ["never", "made", "used"])
def test_closed_agent_refuses_all_moves(begun: str) -> None:
    maker = Maker()
    if begun != "never":
        assert maker.transfer_agent.submit(a_move(1))
        maker.let()
    if begun == "used":
        assert maker.transfer_agent.take_results() == []
    maker.transfer_agent.close()
    assert not maker.transfer_agent.submit(a_move(2)) and maker.transfer_agent.take_results() == []
    assert not [made for made in maker.made if made.taken]  # type: ignore[attr-defined]  # a FakeTransferAgent


def test_only_so_many_wait() -> None:
    maker = Maker()
    assert [maker.transfer_agent.submit(a_move(number)) for number in range(MAX_WAITING + 1)] == [
        True
    ] * MAX_WAITING + [False]
    maker.let()
    maker.transfer_agent.close()


def a_broken_one() -> KvTransferAgent:
    raise RuntimeError("no memory")


def a_full_one() -> KvTransferAgent:
    transfer_agent = FakeTransferAgent()
    transfer_agent.full = True
    return transfer_agent


@pytest.mark.parametrize("makes", [a_broken_one, a_full_one, NoTransferAgent])
def test_one_that_takes_nothing_fails_what_has_waited(makes: Callable[[], KvTransferAgent]) -> None:
    maker = Maker(makes)
    assert maker.transfer_agent.submit(a_move(1))
    maker.transfer_agent.offer_pages(1, 1)
    maker.let()
    assert maker.transfer_agent.take_results() == [MoveResult(1, ok=False, pages=0, us=0)]
    assert not maker.transfer_agent.submit(a_move(2))
    maker.transfer_agent.close()


def test_each_kind_goes_to_its_own_and_ends_are_told_of_all() -> None:
    stores, peers = FakeTransferAgent(), FakeTransferAgent()
    transfer_agents = AgentsByKind(
        {MoveKind.LOAD: stores, MoveKind.STORE: stores, MoveKind.PULL: peers, MoveKind.EXPORT: peers}
    )
    woken: list[str] = []
    transfer_agents.wake = lambda: woken.append("up")
    stores.wake(), peers.wake()
    assert woken == ["up", "up"]
    kinds = {1: MoveKind.LOAD, 2: MoveKind.PULL, 3: MoveKind.STORE, 4: MoveKind.EXPORT}
    assert all(transfer_agents.submit(a_move(number, kind)) for number, kind in kinds.items())
    assert not transfer_agents.submit(a_move(5, MoveKind.COPY)) and not transfer_agents.submit(a_move(2, MoveKind.LOAD))
    assert (list(stores.taken), list(peers.taken)) == ([1, 3], [2, 4])
    transfer_agents.offer_pages(4, 2)
    transfer_agents.offer_pages(9, 2)
    assert (stores.offered, peers.offered) == ({}, {4: 2})
    stores.end(1)
    transfer_agents.end_move(2)
    transfer_agents.end_move(9)
    assert {result.id: result.ok for result in transfer_agents.take_results()} == {1: True, 2: False}
    assert transfer_agents.submit(a_move(2, MoveKind.LOAD))
    transfer_agents.cancel_all()
    assert (stores.cancelled, peers.cancelled) == (1, 1)
    transfer_agents.close()
    assert (stores.cancelled, peers.cancelled) == (2, 2)


def test_agent_that_cannot_be_closed_keeps_no_other_open() -> None:
    stores, peers = FakeTransferAgent(), FakeTransferAgent()
    stores.close = _fail  # type: ignore[method-assign]  # a stand-in
    with pytest.raises(OSError, match="it hangs"):
        AgentsByKind({MoveKind.LOAD: stores, MoveKind.PULL: peers}).close()
    assert peers.cancelled == 1


def _fail() -> None:
    raise OSError("it hangs")
