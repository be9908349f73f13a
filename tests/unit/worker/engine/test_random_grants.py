"""Random Grants: a scheduler that is careful with pages and careless with everything else.

Whatever is granted, tokens are those of the model alone, and the engine's state agrees with itself after every step.
"""

from __future__ import annotations

import dataclasses
import random
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from bench.harness.plain_pages import ids
from quire_common.credit import Budget, Epoch, Grant, MoveKind, PageMove, Report, Start
from quire_common.errors import QuireError
from quire_worker.engine.device import InlineDevice
from quire_worker.engine.slots import SlotTable
from quire_worker.engine.step_schedule import StepSchedule, StepScheduler, _KeptSchedule
from tests.fakes.kv_transfer.fake_transfer_agent import FakeTransferAgent
from tests.fakes.worker.checked_schedules import check_schedules
from tests.fakes.worker.counting_runner import continuation
from tests.fakes.worker.engine_bench import EngineBench, a_start, small_spec
from tests.fakes.worker.held_device import HeldDevice
from tests.tiers import examples

if TYPE_CHECKING:
    from collections.abc import Callable

    from quire_worker.engine.step_schedule import SlotView

budgets = st.builds(
    Budget, st.integers(1, 40), st.integers(0, 20), st.integers(1, 20), st.integers(1, 3), st.integers(0, 3)
)


@dataclasses.dataclass
class Expected:
    """A sequence that was started, and how far it has come."""

    prompt: list[int]
    max_tokens: int
    pages: list[int]
    start_seq: int
    stop_seq: int = 2**62
    got: list[int] = dataclasses.field(default_factory=list)
    ended: bool = False

    @property
    def stop(self) -> tuple[int, ...]:
        """A token that ends half of the sequences early, others never."""
        return (continuation(self.prompt, 3, 97)[2],) if len(self.prompt) % 2 else ()


class CarefulScheduler:
    """Knows whose a row is by the Grant of its step, and gives no page away before its fence."""

    def __init__(self, bench: EngineBench) -> None:
        self.bench = bench
        self.free = list(range(1, bench.spec.num_pages))
        self.held: dict[int, Expected] = {}
        self.past: list[tuple[int, Expected]] = []
        self.loads: dict[int, tuple[list[int], list[int]]] = {}
        self.late = 0
        self.ended_late = 0
        self._stopping: list[tuple[int, list[int]]] = []
        self._finishing: list[tuple[int, list[int]]] = []

    def stop(self, slot: int) -> None:
        gone = self.held.pop(slot, None)
        if gone is None:
            return
        gone.stop_seq = self.bench.seq + 1
        self.past.append((slot, gone))
        loading = {
            page for move, (pages, _) in self.loads.items() if move not in self.bench.told.moved for page in pages
        }
        if not loading & set(gone.pages):
            self._stopping.append((gone.stop_seq, gone.pages))  # those of an open load are left out

    def read(self, report: Report) -> None:
        applied = np.repeat(report.step_applied, report.step_rows)
        for slot, token, finish, grant in zip(report.slot, report.token, report.finish, applied, strict=True):
            expected = self._holder(int(slot), int(grant))
            expected.got.append(int(token))
            assert not expected.ended
            assert expected.got == continuation(expected.prompt, len(expected.got), 97)
            expected.ended = bool(finish)
            assert expected.ended == (len(expected.got) == expected.max_tokens or int(token) in expected.stop)
            self.ended_late += expected.ended and expected.stop_seq < 2**62
            if finish and self.held.get(int(slot)) is expected:
                self.past.append((int(slot), self.held.pop(int(slot))))
                self._finishing.append((report.first_step + report.in_flight, expected.pages))
        assert report.retired <= self.bench.seq and report.in_flight <= 2
        completed = self.bench.engine.steps
        for waiting, passed in ((self._stopping, report.retired), (self._finishing, completed)):
            for fence, pages in [entry for entry in waiting if entry[0] <= passed]:
                self.free += pages
                waiting.remove((fence, pages))

    def _holder(self, slot: int, applied: int) -> Expected:
        present = self.held.get(slot)
        if present is not None and present.start_seq <= applied:
            return present
        self.late += 1
        (former,) = [e for s, e in self.past if s == slot and e.start_seq <= applied < e.stop_seq and not e.ended]
        return former


class Scenario:
    """Rounds of Grants, launches, ends of steps and of loads, in any order."""

    def __init__(self, seed: int, depth: int) -> None:
        self.random = random.Random(seed)
        self.transfer_agent = FakeTransferAgent()
        device = HeldDevice if depth > 1 else InlineDevice
        spec = small_spec(max_num_seqs=3, num_pages=80)
        self.bench = EngineBench(spec, transfer_agent=self.transfer_agent, depth=depth, device=device)
        self.scheduler = CarefulScheduler(self.bench)
        self.schedules = check_schedules(self.bench.engine)

    def run(self) -> CarefulScheduler:
        for _ in range(self.random.randint(1, 25)):
            self._grant()
            for _ in range(self.random.randint(0, 5)):
                self._take_report()
                self._end_a_step(0.5)
            for move_id in [move for move in self.transfer_agent.taken if self.random.random() < 0.5]:
                self._end_a_load(move_id)
        for move_id in list(self.transfer_agent.taken):
            self._end_a_load(move_id)
        while self._take_report() or self._end_a_step(1.0):
            pass
        assert self.bench.told.errors == []
        return self.scheduler

    def _take_report(self) -> bool:
        launched = self.random.random() < 0.7 and self.bench.engine.launch()
        report = self.bench.step()
        if report is not None:
            self.scheduler.read(report)
        return report is not None or launched

    def _end_a_step(self, chance: float) -> bool:
        device = self.bench.device
        ends = isinstance(device, HeldDevice) and bool(device.launched) and self.random.random() < chance
        if ends and isinstance(device, HeldDevice):
            device.end()
        return ends

    def _end_a_load(self, move_id: int) -> None:
        pages, prompt = self.scheduler.loads[move_id]
        arrived = self.random.randint(0, len(pages))
        for place, page in enumerate(pages[:arrived]):
            self.bench.runner.pages[page] = prompt[4 * place : 4 * place + 4]
        self.transfer_agent.end(move_id, arrived)

    def _slots(self, most: int) -> list[int]:
        return self.random.sample(range(self.bench.spec.num_slots), self.random.randint(0, most))

    def _grant(self) -> None:
        free, held = self.scheduler.free, self.scheduler.held
        stops = self._slots(2)
        for slot in stops:
            self.scheduler.stop(slot)
        new = [self._start(slot) for slot in self._slots(4) if slot not in held and len(free) > 12]
        grow = []
        for slot in self._slots(3):
            if free and slot in held and len(held[slot].pages) < self.bench.spec.table_width:
                held[slot].pages.append(free.pop())
                grow.append((slot, held[slot].pages[-1]))
        self.bench.grant(
            *[start for start, _ in new],
            stop=tuple(stops),
            limit={slot: self.random.randint(0, 64) for slot in self._slots(4)},
            grow=tuple(grow),
            order=tuple(self._slots(4)),
            move=tuple(move for _, move in new if move is not None),
            budget=self._budget() if self.bench.seq == 0 or self.random.random() < 0.3 else None,
        )

    def _budget(self) -> Budget:
        tokens, beside, chunk, partial = (self.random.randint(1, most) for most in (40, 20, 20, 3))
        return Budget(tokens, beside, chunk, partial, self.random.choice((0, 0, 1, 3)))

    def _start(self, slot: int) -> tuple[Start, PageMove | None]:
        scheduler, r = self.scheduler, self.random
        prompt = [r.randint(0, 96) for _ in range(r.randint(1, 30))]
        count = r.randint(-(-len(prompt) // 4), 10)
        pages = [scheduler.free.pop() for _ in range(min(count, len(scheduler.free)))]
        expected = scheduler.held[slot] = Expected(prompt, r.randint(1, 8), pages, self.bench.seq + 1)
        whole = min(len(pages), (len(prompt) - 1) // 4)
        move, cached = None, 0
        if whole and r.random() < 0.3:
            move_id = 1000 + self.bench.seq * 10 + slot
            move = PageMove(move_id, MoveKind.LOAD, 0, ids(*pages[:whole]), (b"h" * 32,) * whole)
            cached = 4 * whole
            scheduler.loads[move_id] = (pages[:whole], prompt)
        start = a_start(
            slot,
            prompt,
            pages,
            max_tokens=expected.max_tokens,
            limit=r.randint(0, 60),
            key=r.randint(-3, 3),
            cached=cached,
            stop=expected.stop,
        )
        return start, move


@examples(40)
@given(st.integers(0, 2**32))
def test_tokens_never_depend_on_what_is_granted_when_steps_end_at_once(seed: int) -> None:
    assert Scenario(seed, depth=1).run().late == 0


@examples(100)
@given(st.integers(0, 2**32))
def test_tokens_never_depend_on_what_is_granted_while_steps_run(seed: int) -> None:
    scheduler = Scenario(seed, depth=2).run()
    event(f"late rows: {scheduler.late > 0}")
    event(f"ended late: {scheduler.ended_late > 0}")


def test_random_grants_come_upon_late_rows_and_late_ends() -> None:
    """The property above must not pass because nothing ever happens late."""
    runs = [Scenario(seed, depth=2).run() for seed in range(25)]
    assert sum(run.late for run in runs) > 25 and sum(run.ended_late for run in runs) > 5


def test_random_grants_come_upon_kept_schedules() -> None:
    """Every scenario compares kept schedules with new ones; that must not pass because none is ever kept."""
    scenarios = [Scenario(seed, depth=2) for seed in range(25)]
    for scenario in scenarios:
        scenario.run()
    assert sum(scenario.schedules.kept for scenario in scenarios) > 10


def _keep_after_grants(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StepScheduler, "forget", lambda self: None)


def _keep_at_the_end_of_credit(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StepScheduler, "_holds", lambda self, kept: kept.version == self._table.version)


def _keep_while_slots_change(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SlotTable, "_changed", lambda self: setattr(self, "_by_key", None))


def _keep_beside_prefills(patch: pytest.MonkeyPatch) -> None:
    def to_keep(self: StepScheduler, view: SlotView, budget: Budget, schedule: StepSchedule) -> _KeptSchedule | None:
        if not schedule.decodes:
            return None
        most = np.minimum(view.ceiling, view.bound)[schedule.slot]
        return _KeptSchedule(self._table.version, budget, schedule, most)

    patch.setattr(StepScheduler, "_to_keep", to_keep)


@pytest.mark.parametrize(
    "mutation",
    [_keep_after_grants, _keep_at_the_end_of_credit, _keep_while_slots_change, _keep_beside_prefills],
    ids=lambda mutation: mutation.__name__.strip("_"),
)
def test_a_schedule_that_is_kept_too_long_is_noticed(
    mutation: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutation(monkeypatch)
    with pytest.raises(AssertionError):
        for seed in range(200):
            Scenario(seed, depth=2).run()


chances = st.booleans()
columns = st.lists(st.integers(-2, 12), max_size=5)


@examples(100)
@given(st.data())
def test_senseless_grants_never_break_the_engine(data: st.DataObject) -> None:
    spec = small_spec(max_num_seqs=3, num_pages=12, max_model_len=24)
    bench = EngineBench(spec, transfer_agent=(transfer_agent := FakeTransferAgent()), depth=2, device=HeldDevice)
    assert isinstance(bench.device, HeldDevice)
    for _ in range(data.draw(st.integers(1, 10))):
        starts = data.draw(
            st.lists(
                st.builds(
                    lambda slot, prompt, pages, cached, limit, output, most: a_start(
                        slot, prompt, pages, cached=cached, limit=limit, output=tuple(output), max_tokens=most,
                        max_model_len=24,
                    ),
                    st.integers(-1, 8), st.lists(st.integers(-1, 97), max_size=26), columns, st.integers(0, 30),
                    st.integers(0, 2**31 - 1), st.lists(st.integers(0, 96), max_size=3), st.integers(0, 2**31 - 1),
                ),
                max_size=4,
            )
        )  # fmt: skip
        stop, limit, grow = data.draw(columns), data.draw(columns), data.draw(columns)
        moves = [
            PageMove(data.draw(st.integers(0, 3)), kind, 0, ids(*pages), (b"h" * 32,) * len(pages))
            for kind in data.draw(st.lists(st.sampled_from(MoveKind), max_size=2))
            for pages in [data.draw(columns)]
        ]
        shift = data.draw(st.sampled_from([0, 0, 0, 1]))
        epoch = bench.engine.epoch
        grant = Grant(
            epoch=Epoch(epoch.boot_id, epoch.run + shift),
            seq=bench.seq + 1,
            stop_slot=ids(*stop),
            stop_keep_pages=ids(*stop),
            start=starts,
            limit_slot=ids(*limit),
            limit_position=ids(
                *data.draw(st.lists(st.integers(0, 2**31 - 1), min_size=len(limit), max_size=len(limit)))
            ),
            grow_slot=ids(*grow),
            grow_group=np.array(
                data.draw(st.lists(st.integers(0, 1), min_size=len(grow), max_size=len(grow))), np.int32
            ),
            grow_page=ids(*reversed(grow)),
            order_slot=ids(*data.draw(columns)),
            move=moves,
            budget=data.draw(budgets),
        )
        try:
            bench.engine.apply(grant)
            bench.seq += 1
        except QuireError as error:
            assert error.code == "EPOCH_MISMATCH" and shift
        for _ in range(3):
            bench.step()
            ends: bool = data.draw(chances)
            if bench.device.launched and ends:
                bench.device.end()
        for move_id in list(transfer_agent.taken):
            if data.draw(st.booleans()):
                transfer_agent.end(move_id, data.draw(st.integers(0, len(transfer_agent.taken[move_id].device_page))))
    bench.engine.begin_run()
    bench.engine.check_integrity()
    assert bench.engine.residents.table.started() == 0
