"""Page moves through a real KV transfer agent process: flow, bounds, order, and the end of a run in mid-move."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.harness.plain_pages import ids
from quire_common.credit import MoveKind, PageMove
from quire_worker.kv_transfer.copier import HostCopier
from tests.fakes.kv_transfer.agent_rig import EMPTY, PAGE_BYTES, AgentRig, BytesPool, body, digest, load, store
from tests.tiers import deep_after


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[AgentRig]:
    with AgentRig(tmp_path) as made:
        yield made


def test_pages_flow_through_a_ring_that_is_smaller_than_the_move(tmp_path: Path) -> None:
    with AgentRig(tmp_path, slots=2) as rig:
        pages = range(1, 31)
        rig.stored(*pages)
        targets = range(31, 61)
        rig.pool.clear(*targets)
        result = rig.do(load(2, 1, *targets))
        assert (result.id, result.ok, result.pages) == (2, True, 30)
        assert [rig.pool.pages[page] for page in targets] == [body(page) for page in pages]


def test_stored_pages_are_not_copied_again(rig: AgentRig) -> None:
    rig.stored(1, 2)
    rig.pool.clear(1, 2)  # would be seen in the folder
    result = rig.do(store(2, 1, 2, 3))
    assert (result.ok, result.pages) == (True, 3)
    assert rig.do(load(3, 1, 11, 12, 13)).ok
    assert rig.pool.pages[11:14] == [body(1), body(2), body(3)]


def test_a_wrong_page_ends_the_load_and_is_never_written(rig: AgentRig) -> None:
    rig.stored(1, 2, 3)
    rig.spoil(2)
    rig.pool.clear(11, 12, 13)
    result = rig.do(load(2, 1, 11, 12, 13))
    assert (result.ok, result.pages) == (False, 1)
    assert rig.pool.pages[11:14] == [body(1), EMPTY, EMPTY]


def test_crashing_transport_fails_only_its_move(rig: AgentRig) -> None:
    rig.stored(1)
    pid = rig.transfer_agent.pid
    result = rig.do(load(2, 40, 11))  # there is no such file
    assert (result.ok, result.pages) == (False, 0)
    assert rig.do(load(3, 1, 11)).ok and rig.transfer_agent.pid == pid


def test_full_queues_refuse_and_loads_do_not_wait_for_stores(tmp_path: Path) -> None:
    with AgentRig(tmp_path, max_open=2) as rig:
        rig.stored(1)
        gate = rig.gate(MoveKind.STORE)
        assert rig.transfer_agent.submit(store(2, 2, 3, 4, 5, 6)) and rig.transfer_agent.submit(store(3, 7))
        assert not rig.transfer_agent.submit(store(4, 8))
        rig.drive(gate.await_page)
        assert rig.do(load(5, 1, 11)).ok
        gate.open()
        assert {result.id: result.ok for result in rig.results(2)} == {2: True, 3: True}
        assert rig.do(store(4, 8)).ok


def test_impossible_moves_are_refused(rig: AgentRig) -> None:
    gate = rig.gate(MoveKind.LOAD)
    assert not rig.transfer_agent.submit(PageMove(1, MoveKind.PULL, 0, ids(1), (digest(1),)))
    assert not rig.transfer_agent.submit(PageMove(1, MoveKind.COPY, 0, ids(1), (digest(1),)))
    assert rig.transfer_agent.submit(load(1, 1, 11))
    assert not rig.transfer_agent.submit(load(1, 1, 12))  # the id is in use
    gate.open()
    assert [result.id for result in rig.results(1)] == [1]


def test_after_a_cancel_no_page_of_a_load_is_written(tmp_path: Path) -> None:
    with AgentRig(tmp_path, slots=2) as rig:  # a slot that is lost on the way would be missed
        rig.stored(1, 2, 3)
        gate = rig.gate(MoveKind.LOAD)
        rig.pool.clear(11, 12, 13)
        assert rig.transfer_agent.submit(load(2, 1, 11, 12, 13)) and rig.transfer_agent.submit(load(3, 1, 14))
        gate.await_page()
        rig.woken.clear()
        gate.let_through(2)
        assert rig.woken.wait(60)  # the first page lies in the ring, and the second finds no slot
        rig.transfer_agent.cancel_all()
        gate.open()
        assert rig.do(load(4, 1, 15, 16)).pages == 2
        assert rig.pool.pages[11:14] == [EMPTY] * 3
        assert rig.pool.pages[14:17] == [body(14), body(1), body(2)]


def test_after_a_cancel_nothing_is_stored(tmp_path: Path) -> None:
    with AgentRig(tmp_path, slots=2) as rig:
        rig.stored(9)
        gate = rig.gate(MoveKind.STORE)
        assert rig.transfer_agent.submit(store(2, 1, 2, 3)) and rig.transfer_agent.submit(store(3, 4))
        rig.drive(gate.await_page)
        rig.transfer_agent.cancel_all()
        gate.open()
        assert rig.do(store(5, 5, 6)).ok
        names = {path.name for path in rig.folder.iterdir()}
        assert names - {"store.gate", "store.reached"} == {digest(number).hex() for number in (9, 5, 6)}


def test_pages_of_a_cancelled_run_are_not_taken_for_those_of_a_move_of_the_same_id(rig: AgentRig) -> None:
    rig.stored(1, 9)
    rig.pool.clear(11)
    gate = rig.gate(MoveKind.LOAD)
    assert rig.transfer_agent.submit(load(2, 1, 11))
    gate.await_page()
    rig.woken.clear()
    gate.open()
    assert rig.woken.wait(60)  # the page has come, and nobody has looked
    rig.transfer_agent.cancel_all()
    result = rig.do(load(2, 9, 12))
    assert (result.id, result.ok) == (2, True)
    assert rig.pool.pages[11:13] == [EMPTY, body(9)]


class CountingCopier(HostCopier):
    copies = 0

    def to_page(self, page: int, slot: int) -> None:
        self.copies += 1
        super().to_page(page, slot)

    def to_ring(self, page: int, slot: int) -> None:
        self.copies += 1
        super().to_ring(page, slot)


@pytest.mark.parametrize("kind", deep_after(1, [MoveKind.LOAD, MoveKind.STORE]))
def test_cancelled_move_is_reported_once_and_frees_its_slots(tmp_path: Path, kind: MoveKind) -> None:
    with AgentRig(tmp_path, slots=4) as rig:
        rig.stored(1, 2, 3, 4)
        rig.pool.clear(11, 12, 13, 14)
        gate = rig.gate(kind)
        moves = {
            MoveKind.LOAD: (load(2, 1, 11, 12, 13, 14), load(3, 1, 15)),
            MoveKind.STORE: (store(2, 5, 6, 7, 8), store(3, 9)),
        }[kind]
        assert all(rig.transfer_agent.submit(move) for move in moves)
        gate.let_through(3)  # the engine hears of the first pages when the third finds no slot
        for _ in range(4):
            rig.drive(gate.await_page)
        rig.until(lambda: kind == MoveKind.STORE or rig.pool.pages[12] == body(2))
        for move_id in (3, 2, 2, 77):
            rig.transfer_agent.end_move(move_id)
        arrived = 2 if kind == MoveKind.LOAD else 0
        results = rig.transfer_agent.take_results()
        assert [(result.id, result.ok, result.pages) for result in results] == [(3, False, 0), (2, False, arrived)]
        gate.open()
        # Their ids are free, and what comes late of them is not taken for what they are now.
        assert rig.do(load(2, 1, 21, 22, 23)).ok and rig.do(store(3, *range(30, 40))).ok
        assert rig.pool.pages[13:16] == [EMPTY, EMPTY, body(15)]
        assert rig.pool.pages[21:24] == [body(1), body(2), body(3)]


@pytest.mark.parametrize("kind", deep_after(1, [MoveKind.LOAD, MoveKind.STORE]))
def test_one_call_copies_a_bounded_number_of_bytes(tmp_path: Path, kind: MoveKind) -> None:
    with AgentRig(tmp_path, slots=32, copy_bytes=2 * PAGE_BYTES, copier=CountingCopier) as rig:
        copier = rig.copier
        assert isinstance(copier, CountingCopier)
        if kind == MoveKind.LOAD:
            rig.stored(*range(1, 11))
        gate = rig.gate(MoveKind.LOAD)
        assert rig.transfer_agent.submit(
            load(2, 1, *range(11, 21)) if kind == MoveKind.LOAD else store(2, *range(1, 11))
        )
        for _ in range(9 if kind == MoveKind.LOAD else 0):  # they lie in the ring before the first call
            gate.await_page()
            gate.let_through()
        gate.open()
        calls, ended = [], False
        while not ended:
            before = copier.copies
            ended = bool(rig.transfer_agent.take_results())
            calls.append(copier.copies - before)
            if not ended:
                assert rig.woken.wait(60)
                rig.woken.clear()
        assert sum(calls) == 10 and max(calls) <= 2


class LateCopier(HostCopier):
    """As on a GPU: copies end when the test says so, or when they are drained."""

    def __init__(self, pool: BytesPool, ring: object) -> None:
        super().__init__(pool, ring)  # type: ignore[arg-type]  # the rig's Ring
        self.begun: list[tuple[str, int, int]] = []
        self.marks = self.over = 0

    def to_page(self, page: int, slot: int) -> None:
        self.begun.append(("page", page, slot))

    def to_ring(self, page: int, slot: int) -> None:
        self.begun.append(("ring", page, slot))

    def record_event(self) -> int:
        self.marks += 1
        return self.marks

    def is_complete(self, ticket: int) -> bool:
        return ticket <= self.over

    def drain(self) -> None:
        for kind, page, slot in self.begun:
            super().to_page(page, slot) if kind == "page" else super().to_ring(page, slot)
        self.begun.clear()
        self.over = self.marks


def test_page_counts_only_after_its_copy_ended(tmp_path: Path) -> None:
    with AgentRig(tmp_path, slots=2, copier=LateCopier) as rig:
        copier = rig.copier
        assert isinstance(copier, LateCopier)
        assert rig.transfer_agent.submit(store(1, 1, 2))
        for page in (1, 2):
            rig.until(lambda page=page: [b[:2] for b in copier.begun] == [("ring", page)])  # type: ignore[misc]  # lambda
            copier.drain()
            rig.woken.set()
        assert rig.results(1)[0].ok
        rig.pool.clear(11, 12)
        assert rig.transfer_agent.submit(load(2, 1, 11, 12))
        for page in (11, 12):
            rig.until(lambda page=page: [b[:2] for b in copier.begun] == [("page", page)])  # type: ignore[misc]  # lambda
            assert rig.transfer_agent.take_results() == [] and rig.pool.pages[page] == EMPTY
            copier.drain()
            rig.woken.set()
        assert rig.results(1)[0].ok
        assert rig.pool.pages[11:13] == [body(1), body(2)]


@pytest.mark.parametrize("kind", deep_after(1, [MoveKind.LOAD, MoveKind.STORE]))
def test_cancelled_move_is_reported_after_its_copies_ended(tmp_path: Path, kind: MoveKind) -> None:
    with AgentRig(tmp_path, slots=2, copier=LateCopier) as rig:
        copier = rig.copier
        assert isinstance(copier, LateCopier)
        assert rig.transfer_agent.submit(store(1, 1))
        rig.until(lambda: bool(copier.begun))
        copier.drain()
        assert rig.results(1)[0].ok
        assert rig.transfer_agent.submit(load(2, 1, 11) if kind == MoveKind.LOAD else store(2, 2))
        rig.until(lambda: bool(copier.begun))
        rig.transfer_agent.end_move(2)
        assert rig.transfer_agent.take_results() == [] and not rig.transfer_agent.submit(load(2, 1, 12))
        copier.drain()
        (result,) = rig.transfer_agent.take_results()
        assert (result.id, result.ok, result.pages) == (2, False, 1 if kind == MoveKind.LOAD else 0)
        assert rig.transfer_agent.submit(load(2, 1, 12))
        rig.until(lambda: bool(copier.begun))
        copier.drain()
        assert rig.results(1)[0].ok


def test_a_cancel_waits_for_copies_and_keeps_their_slots(tmp_path: Path) -> None:
    with AgentRig(tmp_path, slots=2, copier=LateCopier) as rig:
        copier = rig.copier
        assert isinstance(copier, LateCopier)
        assert rig.transfer_agent.submit(store(1, 1))
        rig.until(lambda: bool(copier.begun))
        rig.transfer_agent.cancel_all()
        assert copier.begun == []
        assert rig.transfer_agent.submit(store(2, 2))
        rig.until(lambda: bool(copier.begun))
        copier.drain()
        assert rig.results(1)[0].ok
        assert rig.transfer_agent.submit(load(3, 2, 11))
        rig.until(lambda: bool(copier.begun))
        rig.transfer_agent.cancel_all()
        assert copier.begun == []
        assert rig.transfer_agent.submit(load(4, 2, 12))
        rig.until(lambda: bool(copier.begun))
        copier.drain()
        assert rig.results(1)[0].ok
