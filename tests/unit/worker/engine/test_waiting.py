"""Waiting slots and the holders of pages are counted as they change: what that comes to is what a look at every slot
comes to, and costs the model thread no more with many slots than with few."""

from __future__ import annotations

import copy
import dataclasses
import random
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from bench.harness.plain_pages import ids
from quire_common.credit import Finish, MoveKind, PageMove
from quire_common.errors import QuireError
from quire_worker.arrays import Int32
from quire_worker.engine.export_offers import ExportOffers
from quire_worker.engine.page_states import NOBODY, PageStates
from quire_worker.engine.ports import NullObserver
from quire_worker.engine.resident_slots import ResidentSlots
from quire_worker.engine.slots import SlotState
from tests.fakes.kv_transfer.agent_rig import QUICK, AgentRig
from tests.fakes.kv_transfer.fake_transfer_agent import FakeTransferAgent
from tests.fakes.worker.engine_bench import a_start, small_spec
from tests.tiers import deep_after

# Mean thread CPU time of a call, of the best of several rounds.
LIMIT_S = 100e-6
PAGE = 4


def plain_admit(residents: ResidentSlots) -> list[tuple[int, str]]:
    """Every waiting slot is judged, highest order key first."""
    table, lost = residents.table, []
    waiting = np.flatnonzero(table.state == SlotState.WAITING).tolist()
    for slot in sorted(waiting, key=lambda s: (-int(table.order_key[s]), -s)):
        code = plain_verdict(residents, slot)
        if code:
            lost.append((slot, code))
            residents.end(slot, Finish.ERROR)
    return lost


def plain_verdict(residents: ResidentSlots, slot: int) -> str:
    table, states = residents.table, residents.states
    cached = int(table.computed[slot])
    pages = table.pages(slot)[: -(-cached // PAGE)]
    short = [place for place, page in enumerate(pages) if states.ready[page] < min(cached - place * PAGE, PAGE)]
    awaited = {p for p in short if states.pending[pages[p]] or states.writer[pages[p]] not in (NOBODY, slot)}
    lost = [place for place in short if place not in awaited]
    if short and not lost:
        return ""
    if lost:
        tail = pages[lost[0] :]
        if short[0] != lost[0] or states.pending[tail].any():
            return ""
        if not states.failed[pages[lost]].all() or (states.refs[tail] > 1).any():
            return "PAGES_LOST"
        states.claim(tail, slot)
        table.cached_len[slot] = table.computed[slot] = lost[0] * PAGE
    table.state[slot] = SlotState.RUNNING
    states.running[table.pages(slot)] += 1
    return ""


def plain_can_load(residents: ResidentSlots, pages: Int32) -> bool:
    table, states = residents.table, residents.states
    if len(set(pages.tolist())) != len(pages) or pages.min() < 1 or pages.max() >= states.num_pages:
        return False
    for page in pages.tolist():
        if states.exported[page] or states.pending[page] or states.busy_until[page] > residents.settled:
            return False
        holders = [s for s in np.flatnonzero(table.state == SlotState.RUNNING).tolist() if page in table.pages(s)]
        writer = int(states.writer[page])
        if holders or (
            writer != NOBODY and page not in table.pages(writer)[: -(-int(table.computed[writer]) // PAGE)].tolist()
        ):
            return False
    return True


class Careless:
    """Starts, grows, stops, fills, moves and voids at random, also what no scheduler would ask for; but never lets a
    page be filled anew under a slot that waits for it."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        spec = small_spec(max_num_seqs=4, num_pages=24, slots=8)
        self.residents = ResidentSlots(spec, NullObserver())
        self.loads: list[Int32] = []

    def act(self) -> None:
        act: Callable[[], None] = self.random.choice(
            [self.start, self.start, self.grow, self.stop, self.compute, self.compute, self.load, self.end_load]
        )
        act()

    def start(self) -> None:
        rng, residents = self.random, self.residents
        slot = rng.randrange(8)
        if residents.holds(slot):
            return
        held = [s for s in range(8) if residents.holds(s)]
        shared = residents.table.pages(rng.choice(held)).tolist() if held and rng.random() < 0.7 else []
        shared = shared[: rng.randint(0, len(shared))]
        awaited = self.awaited()
        others = [page for page in range(1, 24) if page not in shared and page not in awaited]
        pages = shared + rng.sample(others, min(len(others), rng.randint(1, 4)))
        known = rng.randint(1, len(pages) * PAGE)
        cached = rng.randint(0, known)
        shared_own = set(shared[min(cached, known - 1) // PAGE :])
        if shared_own & awaited or len(others) < 4:
            return
        try:
            residents.start(a_start(slot, [1] * known, pages, cached=cached, key=rng.randrange(4)))
        except QuireError:
            residents.void(ids(*pages[-(-cached // PAGE) :]))
        else:
            if rng.random() < 0.6:
                self.load([page for page in pages[: -(-cached // PAGE)] if page not in awaited])

    def grow(self) -> None:
        slot = self.random.randrange(8)
        if self.residents.holds(slot):
            page = self.random.randint(1, 23)
            if self.random.random() < 0.5:
                self.residents.grow_all(ids(slot), ids(page))
                return
            try:
                self.residents.grow(slot, page)
            except QuireError:
                self.residents.end(slot, Finish.ERROR)

    def stop(self) -> None:
        slot = self.random.randrange(8)
        if self.residents.holds(slot) and self.random.random() < 0.5:
            self.residents.stop(slot)

    def compute(self) -> None:
        residents, table = self.residents, self.residents.table
        running = np.flatnonzero(table.state == SlotState.RUNNING).tolist()
        if not running:
            return
        slot = self.random.choice(running)
        first = int(table.computed[slot])
        end = min(first + self.random.randint(1, 9), int(table.num_pages[slot]) * PAGE, int(table.bound[slot]))
        if end > first:
            residents.note_launch(ids(slot), ids(end), residents.settled + 1, 0)
            residents.settled += 1
            residents.computed_to(ids(slot), ids(first), ids(end))
            if table.decoding[slot]:
                table.known_len[slot] = end + 1

    def load(self, wanted: list[int] | None = None) -> None:
        awaited = self.awaited()
        free = [page for page in range(1, 24) if page not in awaited]
        pages = ids(*(wanted or self.random.sample(free, min(len(free), self.random.randint(1, 3)))))
        if not len(pages):
            return
        possible = self.residents.can_load(pages)
        assert possible == plain_can_load(self.residents, pages)
        if possible:
            self.residents.states.expect(pages)
            self.loads.append(pages)

    def end_load(self) -> None:
        if self.loads:
            pages = self.loads.pop(self.random.randrange(len(self.loads)))
            count = self.random.choice([0, len(pages), self.random.randint(0, len(pages))])
            self.residents.states.arrived(pages, count, self.random.choice([0, 0, 2]))

    def awaited(self) -> set[int]:
        """Pages of the cached ranges of slots that wait."""
        table = self.residents.table
        waiting = np.flatnonzero(table.state == SlotState.WAITING).tolist()
        return {int(page) for slot in waiting for page in table.pages(slot)[: -(-int(table.computed[slot]) // PAGE)]}

    def admit(self) -> None:
        twin = copy.deepcopy(self.residents)
        expected = plain_admit(twin)
        assert [(slot, error.code) for slot, error in self.residents.admit_ready()] == expected
        for name in ("state", "computed", "cached_len", "num_pages"):
            assert (getattr(self.residents.table, name) == getattr(twin.table, name)).all(), name
        for name in ("ready", "writer", "pending", "failed", "refs", "running", "busy_until"):
            assert (getattr(self.residents.states, name) == getattr(twin.states, name)).all(), name
        self.residents.check_integrity()


@pytest.mark.parametrize("seed", deep_after(40, range(150)))
def test_waiting_slots_go_on_as_if_each_were_judged_at_every_step(seed: int) -> None:
    careless = Careless(seed)
    for _ in range(120):
        careless.act()
        if careless.random.random() < 0.6:
            careless.admit()


def cpu_s(call: Callable[[], object]) -> float:
    """Mean thread CPU time of a call, of the best of five rounds: a busy machine makes rounds slower, never faster."""
    rounds = []
    for _ in range(5):
        began = time.thread_time()
        for _ in range(20):
            call()
        rounds.append((time.thread_time() - began) / 20)
    return min(rounds)


def crowd(slots: int, waiting: bool) -> ResidentSlots:
    """That many sequences of 32 pages each: all but the first wait for its pages, or all run."""
    pages = 32
    spec = small_spec(max_num_seqs=slots, slots=slots, max_model_len=4 * pages, num_pages=slots * pages + 100)
    residents = ResidentSlots(spec, NullObserver())
    shared = list(range(1, pages))
    for slot in range(slots):
        own = list(range(1 + slot * pages, 1 + (slot + 1) * pages))
        table = [*shared, own[-1]] if waiting and slot else own
        cached = 4 * (pages - 1) if waiting and slot else 0
        residents.start(a_start(slot, [1] * (4 * pages - 2), table, cached=cached, max_model_len=4 * pages))
    residents.admit_ready()
    return residents


@pytest.mark.parametrize("slots", [8, 512])
def test_a_move_costs_the_model_thread_little_at_any_number_of_running_slots(slots: int) -> None:
    residents = crowd(slots, waiting=False)
    free = np.arange(slots * 32 + 1, slots * 32 + 33, dtype=np.int32)
    assert residents.can_load(free) and not residents.can_load(free - 1)
    assert cpu_s(lambda: residents.can_load(free)) < LIMIT_S


@pytest.mark.parametrize("slots", [8, 500])
def test_slots_that_wait_cost_a_step_little(slots: int) -> None:
    residents = crowd(slots, waiting=True)
    states, table = residents.states, residents.table
    assert np.count_nonzero(table.state == SlotState.WAITING) == slots - 1
    assert cpu_s(residents.admit_ready) < LIMIT_S
    for end in range(4, 4 * 30 + 1, 4):  # the one that fills the pages goes on: nobody is judged before the last
        residents.computed_to(ids(0), ids(end - 4), ids(end))
        assert cpu_s(residents.admit_ready) < LIMIT_S
    residents.computed_to(ids(0), ids(4 * 30), ids(4 * 31))
    assert residents.admit_ready() == [] and (table.state == SlotState.RUNNING).all()
    assert states.running[1] == slots


def test_exports_that_are_not_filled_yet_cost_a_step_little() -> None:
    states, transfer_agent = PageStates(4 * 1000 + 1, PAGE), FakeTransferAgent()
    lending = ExportOffers(states, transfer_agent)
    for number in range(1000):
        lending.begin(
            PageMove(number, MoveKind.EXPORT, 0, np.arange(4 * number + 1, 4 * number + 5, dtype=np.int32), ())
        )
    assert cpu_s(lending.offer_ready) < LIMIT_S and not transfer_agent.offered
    states.ready[4 * 700 + 1 : 4 * 700 + 4] = PAGE
    lending.offer_ready()
    assert transfer_agent.offered == {700: 3} and cpu_s(lending.offer_ready) < LIMIT_S
    lending.check_integrity()


def costs_of(opened: int, folder: Path) -> tuple[float, float]:
    """Of `take_results` and of one move more, with so many open. Their process says nothing, so that none ends."""
    moves = iter(PageMove(number, MoveKind.STORE, 0, ids(1), (bytes(32),)) for number in range(2000))
    command, timeouts = ("sh", "-c", "exec sleep 60"), dataclasses.replace(QUICK, stop_s=0.01)
    with AgentRig(folder, max_open=5000, command=command, timeouts=timeouts) as rig:
        assert all(rig.transfer_agent.submit(next(moves)) for _ in range(opened))
        return cpu_s(rig.transfer_agent.take_results), cpu_s(lambda: rig.transfer_agent.submit(next(moves)))


def test_moves_that_wait_cost_the_movers_part_of_a_step_nothing(tmp_path: Path) -> None:
    """Other work on this machine can only add to what is measured, so the least of several attempts counts."""
    few, many = (np.min([costs_of(opened, tmp_path) for _ in range(3)], axis=0) for opened in (10, 1000))
    assert (many < few + 20e-6).all()


def test_slots_that_wait_cost_little_while_moves_of_others_fail() -> None:
    residents = crowd(500, waiting=True)
    load = ids(500 * 32 + 1, 500 * 32 + 2)

    def fail() -> None:
        residents.states.expect(load)
        residents.states.arrived(load, 0)
        residents.admit_ready()

    assert cpu_s(fail) < LIMIT_S
