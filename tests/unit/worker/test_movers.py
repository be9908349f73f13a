"""A mover that is made when it is needed, and several as one."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from bench.harness.plain_pages import ids
from quire_common.credit import MoveKind, PageMove
from quire_worker.engine.moves import Mover, MoveResult, NoMover
from quire_worker.mover.mover_on_demand import MAX_WAITING, MoverOnDemand
from quire_worker.mover.movers import Movers
from tests.fakes.fake_mover import FakeMover

WAIT_S = 30.0


def a_move(move_id: int, kind: MoveKind = MoveKind.EXPORT) -> PageMove:
    return PageMove(move_id, kind, 0, ids(1, 2), (b"a" * 32, b"b" * 32))


class Maker:
    """Makes a FakeMover when the test lets it."""

    def __init__(self, makes: Callable[[], Mover] = FakeMover) -> None:
        self.made: list[Mover] = []
        self.may = threading.Event()
        self.woken = threading.Event()
        self.mover = MoverOnDemand(self._make)
        self.mover.wake = self.woken.set
        self._makes = makes

    def let(self) -> None:
        self.may.set()
        assert self.woken.wait(WAIT_S)

    def _make(self) -> Mover:
        assert self.may.wait(WAIT_S)
        self.made.append(self._makes())
        return self.made[-1]


def test_nothing_is_made_for_nobody() -> None:
    maker = Maker()
    maker.mover.cancel()
    assert maker.mover.finished() == []
    maker.mover.close()
    assert maker.made == []


def test_it_is_made_once_ahead_of_the_first_move_where_moves_are_expected() -> None:
    maker = Maker()
    maker.mover.begin()
    maker.mover.begin()
    maker.let()
    assert len(maker.made) == 1 and maker.mover.finished() == []
    assert maker.mover.submit(a_move(1))
    (made,) = maker.made
    assert isinstance(made, FakeMover) and list(made.taken) == [1], "it need not wait"
    maker.mover.close()
    maker.mover.begin()
    assert len(maker.made) == 1


def test_moves_and_offers_wait_until_it_is_there() -> None:
    maker = Maker()
    assert maker.mover.submit(a_move(1)) and maker.mover.submit(a_move(2))
    assert not maker.mover.submit(a_move(1))
    maker.mover.offer(1, 2)
    assert maker.mover.finished() == []
    maker.let()
    assert maker.mover.finished() == []
    (made,) = maker.made
    assert isinstance(made, FakeMover) and list(made.taken) == [1, 2] and made.offered == {1: 2}
    assert made.wake == maker.mover.wake
    assert maker.mover.submit(a_move(3))
    maker.mover.offer(2, 1)
    made.end(3)
    maker.mover.end_early(2)
    assert {result.id: result.ok for result in maker.mover.finished()} == {3: True, 2: False}
    assert made.offered == {1: 2, 2: 1} and len(maker.made) == 1
    maker.mover.close()
    assert made.cancelled == 1


def test_moves_that_end_before_it_is_there_are_told_of_once_and_never_begun() -> None:
    maker = Maker()
    assert maker.mover.submit(a_move(1)) and maker.mover.submit(a_move(2))
    maker.mover.end_early(1)
    maker.mover.end_early(1)
    assert maker.mover.finished() == [MoveResult(1, ok=False, pages=0, us=0)]
    maker.mover.cancel()
    maker.mover.submit(a_move(3))
    maker.let()
    assert maker.mover.finished() == []
    (made,) = maker.made
    assert isinstance(made, FakeMover) and list(made.taken) == [3]
    maker.mover.close()


def test_only_so_many_wait() -> None:
    maker = Maker()
    assert [maker.mover.submit(a_move(number)) for number in range(MAX_WAITING + 1)] == [True] * MAX_WAITING + [False]
    maker.let()
    maker.mover.close()


def a_broken_one() -> Mover:
    raise RuntimeError("no memory")


def a_full_one() -> Mover:
    mover = FakeMover()
    mover.full = True
    return mover


@pytest.mark.parametrize("makes", [a_broken_one, a_full_one, NoMover])
def test_one_that_takes_nothing_fails_what_has_waited(makes: Callable[[], Mover]) -> None:
    maker = Maker(makes)
    assert maker.mover.submit(a_move(1))
    maker.mover.offer(1, 1)
    maker.let()
    assert maker.mover.finished() == [MoveResult(1, ok=False, pages=0, us=0)]
    assert not maker.mover.submit(a_move(2))
    maker.mover.close()


def test_each_kind_goes_to_its_own_and_ends_are_told_of_all() -> None:
    stores, peers = FakeMover(), FakeMover()
    movers = Movers({MoveKind.LOAD: stores, MoveKind.STORE: stores, MoveKind.PULL: peers, MoveKind.EXPORT: peers})
    woken: list[str] = []
    movers.wake = lambda: woken.append("up")
    stores.wake(), peers.wake()
    assert woken == ["up", "up"]
    kinds = {1: MoveKind.LOAD, 2: MoveKind.PULL, 3: MoveKind.STORE, 4: MoveKind.EXPORT}
    assert all(movers.submit(a_move(number, kind)) for number, kind in kinds.items())
    assert not movers.submit(a_move(5, MoveKind.COPY)) and not movers.submit(a_move(2, MoveKind.LOAD))
    assert (list(stores.taken), list(peers.taken)) == ([1, 3], [2, 4])
    movers.offer(4, 2)
    movers.offer(9, 2)
    assert (stores.offered, peers.offered) == ({}, {4: 2})
    stores.end(1)
    movers.end_early(2)
    movers.end_early(9)
    assert {result.id: result.ok for result in movers.finished()} == {1: True, 2: False}
    assert movers.submit(a_move(2, MoveKind.LOAD))
    movers.cancel()
    assert (stores.cancelled, peers.cancelled) == (1, 1)
    movers.close()
    assert (stores.cancelled, peers.cancelled) == (2, 2)
