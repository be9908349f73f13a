"""Random moves, cancels and deaths: what is reported is there, nothing else is touched, and no slot is ever lost."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

import pytest

from quire_common.credit import MoveKind, PageMove
from quire_worker.engine.transfer_agent import MoveResult
from tests.fakes.kv_transfer.agent_rig import EMPTY, AgentRig, body, load, store
from tests.tiers import deep_after

SOURCES = range(1, 17)
TARGETS = range(17, 64)
OPERATIONS = 400


class Course:
    """One run of random operations, with what must hold after each."""

    def __init__(self, rig: AgentRig, seed: int) -> None:
        self.rig = rig
        self.random = random.Random(seed)
        self.open: dict[int, PageMove] = {}
        self.expected: dict[int, bytes] = dict.fromkeys(TARGETS, EMPTY)
        """What a target holds that no open load may write."""
        self.next_id = 1
        self.done = {"ok": 0, "failed": 0, "cancelled": 0, "killed": 0, "ended early": 0}
        rig.pool.clear(*TARGETS)
        rig.stored(1)

    def run(self) -> None:
        for _ in range(OPERATIONS):
            draw = self.random.random()
            if draw < 0.5:
                self.submit()
            elif draw < 0.9:
                self.look(wait=bool(self.open) and self.random.random() < 0.5)
            elif draw < 0.94:
                self.end_early()
            elif draw < 0.99:
                self.cancel()
            else:
                self.kill()
            self.check_targets()
        while self.open:
            self.look(wait=True)
        self.check_targets()

    def submit(self) -> None:
        count = self.random.randint(1, 6)
        first = self.random.choice(SOURCES[: -count + 1 or None])
        if self.random.random() < 0.5:
            move = store(self.next_id, *range(first, first + count))
        else:
            free = [page for page in TARGETS if page not in self.awaited()]
            move = load(self.next_id, first, *self.random.sample(free, count))
            self.rig.pool.clear(*move.device_page.tolist())
        if self.rig.transfer_agent.submit(move):
            self.open[move.id] = move
        elif move.kind == MoveKind.LOAD:
            self.expected |= dict.fromkeys(move.device_page.tolist(), EMPTY)
        self.next_id += 1

    def end_early(self) -> None:
        """It is told of by the next look at the latest: copies here end when they begin."""
        for move_id in self.random.sample(sorted(self.open), min(len(self.open), 1)):
            self.rig.transfer_agent.end_move(move_id)
            self.done["ended early"] += 1
            self.look(wait=False)
            assert move_id not in self.open

    def look(self, wait: bool) -> None:
        results = self.rig.transfer_agent.take_results()
        while wait and not results:
            assert self.rig.woken.wait(60)
            self.rig.woken.clear()
            results = self.rig.transfer_agent.take_results()
        for result in results:
            self.settle(result)

    def settle(self, result: MoveResult) -> None:
        move = self.open.pop(result.id)  # one of ours, and never twice
        self.done["ok" if result.ok else "failed"] += 1
        if move.kind == MoveKind.LOAD:
            pages = move.device_page.tolist()
            came = [self.rig.pool.pages[page] for page in pages[: result.pages]]
            assert came == [self.body_of(move, place) for place in range(result.pages)]
            self.expected |= {page: self.rig.pool.pages[page] for page in pages}

    def cancel(self) -> None:
        self.rig.transfer_agent.cancel_all()
        self.done["cancelled"] += len(self.open)
        self.expected |= {page: self.rig.pool.pages[page] for page in self.awaited()}
        self.open.clear()
        self.next_id = 1  # as another run would

    def kill(self) -> None:
        pid = self.rig.transfer_agent.pid
        if pid is not None:
            os.kill(pid, signal.SIGKILL)
            self.done["killed"] += 1
        while self.open:
            self.look(wait=True)
        self.rig.until_ok(store(9000, 1))

    def awaited(self) -> set[int]:
        return {page for move in self.open.values() if move.kind == MoveKind.LOAD for page in move.device_page.tolist()}

    def check_targets(self) -> None:
        pages = self.rig.pool.pages
        assert [pages[page] for page in SOURCES] == [body(page) for page in SOURCES]
        awaited = self.awaited()
        for page in TARGETS:
            assert page in awaited or pages[page] == self.expected[page]
        for move in self.open.values():
            if move.kind == MoveKind.LOAD:
                for place, page in enumerate(move.device_page.tolist()):
                    assert pages[page] in (EMPTY, self.body_of(move, place))

    def body_of(self, move: PageMove, place: int) -> bytes:
        return body(int.from_bytes(move.hashes[place], "big"))


@pytest.mark.parametrize(("seed", "slots"), deep_after(1, [(3, 16), (1, 2), (2, 5)]))
def test_random_moves_lose_no_page(tmp_path: Path, seed: int, slots: int) -> None:
    with AgentRig(tmp_path, slots=slots) as rig:
        course = Course(rig, seed)
        course.run()
        assert min(course.done.values()) > 0, course.done
        # With a slot lost, the smallest ring would be stuck now.
        rig.until_ok(store(9001, *SOURCES))
        assert rig.do(load(9002, 1, *TARGETS[: len(SOURCES)])).ok
        assert rig.pool.pages[TARGETS[0] : TARGETS[0] + len(SOURCES)] == [body(page) for page in SOURCES]
