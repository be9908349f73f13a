"""Random exports, pulls, offers, cancels, runs and deaths of three workers: what is told of is there, nothing else is
touched, every move is told of once, and in the end nothing is left."""

from __future__ import annotations

import random
import signal
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeVar

import pytest

from tests.fakes.kv_transfer.peer_rig import EMPTY, PeerRig, PeerSide, content, peer_rig

SOURCES = range(1, 21)
TARGETS = range(21, 61)
OPERATIONS = 150
T = TypeVar("T")


@dataclass
class Export:
    side: PeerSide
    id: int
    pages: list[int]
    key: bytes
    offered: int = 0


@dataclass
class Pull:
    side: PeerSide
    id: int
    numbers: list[int]
    targets: list[int]


@dataclass
class Course:
    rig: PeerRig
    random: random.Random
    exports: dict[int, Export] = field(default_factory=dict)
    pulls: dict[int, Pull] = field(default_factory=dict)
    done: dict[str, int] = field(default_factory=dict)
    next_id: int = 1

    def __post_init__(self) -> None:
        self.expected = [dict.fromkeys(TARGETS, EMPTY) for _ in self.rig.sides]
        for side in self.rig.sides:
            for page in TARGETS:
                side.pool.pages[page] = EMPTY

    def run(self) -> None:
        steps = [self.export, self.pull, self.pull, self.offer, self.offer, self.offer, self.look, self.look]
        rare = [self.cut_pull, self.cut_export, self.new_run, self.kill, self.stop]
        for _ in range(OPERATIONS):
            self.random.choice(steps if self.random.random() < 0.93 else rare)()
            self.settle()
        self.export()
        self.pull()
        for export in self.exports.values():
            export.side.transfer_agent.offer_pages(export.id, len(export.pages))
        self.rig.until(lambda: not self.settle() and not self.pulls)
        for export in self.exports.values():
            export.side.transfer_agent.end_move(export.id)
        self.rig.until(lambda: not self.settle() and not self.exports and not self.pulls)

    def export(self) -> None:
        side, number = self.random.choice(self.rig.sides), self.take_id()
        pages = self.random.sample(SOURCES, self.random.randint(1, 8))
        self.exports[number] = Export(side, number, pages, self.random.randbytes(32))
        side.export(number, *pages, key=self.exports[number].key, offered=0)
        if side.transfer_agent.pid is None:
            self.rig.until(lambda: side.transfer_agent.pid is not None)

    def pull(self) -> None:
        if not self.exports:
            return
        export = self.random.choice(list(self.exports.values()))
        side = self.random.choice([side for side in self.rig.sides if side is not export.side])
        first = self.random.randrange(len(export.pages))
        numbers = export.pages[first : first + self.random.randint(1, 8)]
        free = [page for page in TARGETS if page not in self.awaited(side)]
        if len(free) < len(numbers):
            return
        targets, number = self.random.sample(free, len(numbers)), self.take_id()
        key = export.key if self.random.random() < 0.9 else self.random.randbytes(32)
        self.pulls[number] = Pull(side, number, numbers, targets)
        side.pull(number, export.side.sources, numbers, targets, key=key, first=first)

    def offer(self) -> None:
        for export in self.some(self.exports.values()):
            export.offered = self.random.randint(export.offered, len(export.pages))
            export.side.transfer_agent.offer_pages(export.id, export.offered)

    def look(self) -> None:
        self.rig.go_on_for(self.random.choice((0.0, 0.05, 0.3)))

    def cut_pull(self) -> None:
        for pull in self.some(self.pulls.values()):
            pull.side.transfer_agent.end_move(pull.id)

    def cut_export(self) -> None:
        for export in self.some(self.exports.values()):
            export.side.transfer_agent.end_move(export.id)

    def new_run(self) -> None:
        side = self.random.choice(self.rig.sides)
        side.transfer_agent.cancel_all()
        for pull in [pull for pull in self.pulls.values() if pull.side is side and pull.id not in side.told]:
            self.forget(pull)
            self.note("void")
        self.exports = {n: e for n, e in self.exports.items() if e.side is not side or e.id in side.told}

    def kill(self) -> None:
        side = self.random.choice(self.rig.sides)
        pid = side.pid
        side.signal(signal.SIGKILL)
        self.note("killed")
        self.rig.until(lambda: side.transfer_agent.pid not in (None, pid))

    def stop(self) -> None:
        side = self.random.choice(self.rig.sides)
        side.signal(signal.SIGSTOP)
        self.rig.go_on_for(self.random.choice((0.05, 2.5)))
        side.signal(signal.SIGCONT)
        self.note("stopped")

    def settle(self) -> bool:
        """Take note of what was told, and compare all pages; False."""
        for side in self.rig.sides:
            side.collect()
        for pull in [pull for pull in self.pulls.values() if pull.id in pull.side.told]:
            pages = pull.side.told[pull.id].pages
            came = [content(number) for number in pull.numbers[:pages]] + [EMPTY] * (len(pull.numbers) - pages)
            assert [pull.side.pool.pages[target] for target in pull.targets] == came
            self.forget(pull)
            self.note("pulled" if pull.side.told[pull.id].ok else "pulled in part")
        for export in [export for export in self.exports.values() if export.id in export.side.told]:
            del self.exports[export.id]
            self.note("exported" if export.side.told[export.id].ok else "not exported")
        for side, expected in zip(self.rig.sides, self.expected, strict=True):
            awaited = self.awaited(side)
            assert all(side.pool.pages[page] == was for page, was in expected.items() if page not in awaited)
            assert [side.pool.pages[page] for page in SOURCES] == [content(page) for page in SOURCES]
        return False

    def forget(self, pull: Pull) -> None:
        del self.pulls[pull.id]
        now = {target: pull.side.pool.pages[target] for target in pull.targets}
        self.expected[self.rig.sides.index(pull.side)] |= now

    def awaited(self, side: PeerSide) -> set[int]:
        return {target for pull in self.pulls.values() if pull.side is side for target in pull.targets}

    def some(self, things: Iterable[T]) -> list[T]:
        found = list(things)
        return self.random.sample(found, min(len(found), 2))

    def take_id(self) -> int:
        self.next_id += 1
        return self.next_id

    def note(self, what: str) -> None:
        self.done[what] = self.done.get(what, 0) + 1


@pytest.mark.deep
@pytest.mark.parametrize(
    ("seed", "slots", "transport"), [(1, 4, "auto"), (2, 16, "shm"), (3, 8, "tcp"), (4, 8, "grpc")]
)
def test_random_moves_between_three_workers(seed: int, slots: int, transport: str) -> None:
    with peer_rig() as rig:
        for _ in range(3):
            rig.side(slots=slots, transport=transport)
        course = Course(rig, random.Random(seed))
        course.run()
        assert {"pulled", "exported", "pulled in part", "not exported"} <= course.done.keys(), course.done
        rig.assert_nothing_left()
