"""A page holder applies the frames of a page stream to the directory."""

from __future__ import annotations

import hashlib
import itertools
from typing import Any

import pytest

from quire_common.credit.hello import Epoch
from quire_router.pages.page_directory import PageDirectory
from quire_router.pages.page_holder import PageGap, PageHolder, PageUpdate, Pool
from quire_router.pages.page_keys import page_keys

NS = b"n" * 32
CHAIN = [hashlib.sha256(bytes([i])).digest() for i in range(20)]
LIFE = Epoch(1, 1)


def update(last: int, *, first: int = 0, epoch: Epoch = LIFE, **fields: Any) -> PageUpdate:
    return PageUpdate(epoch, first or last, last, **fields)


def pages(first: int, end: int, namespace: bytes = NS) -> tuple[Pool, ...]:
    return (Pool(namespace, 0, CHAIN[first:end]),)


class Rig:
    def __init__(self) -> None:
        self.directory = PageDirectory(1000, 10.0)
        self.said: list[tuple[int, int]] = []
        self.holder = PageHolder(self.directory, lambda number, life: self.said.append((number, life)))

    @property
    def numbers(self) -> list[int]:
        """Each under which the pages were known, in turn."""
        return [number for number, _ in itertools.groupby(number for number, _ in self.said)]

    @property
    def life(self) -> int:
        """Of which every page is known; 0: some may be missing."""
        return self.said[-1][1] if self.said else 0

    @property
    def depth(self) -> int:
        """What lookups find now."""
        depths = self.directory.prefixes([page_keys(NS, 0, CHAIN)], 0.0).depths
        return int(depths[self.holder.number]) if self.holder.number >= 0 else 0

    def start(self, end: int = 10) -> None:
        self.holder.apply(update(7, snapshot=True, complete=True, stored=pages(0, end)))


@pytest.fixture
def rig() -> Any:
    made = Rig()
    yield made
    made.directory.check_integrity()


def test_snapshot_applies_only_when_complete(rig: Rig) -> None:
    rig.holder.apply(update(7, snapshot=True, stored=pages(0, 5)))
    assert rig.holder.number == -1 and rig.holder.epoch is None
    rig.holder.apply(update(7, snapshot=True, complete=True, stored=pages(5, 9)))
    assert (rig.depth, rig.holder.sequence) == (9, 7)
    assert rig.numbers == [rig.holder.number] and rig.directory.present == 1


def test_consecutive_updates_apply_and_gaps_raise(rig: Rig) -> None:
    rig.start()
    rig.holder.apply(update(10, first=8, removed=pages(9, 10, b""), stored=pages(12, 13)))
    assert rig.depth == 9 and rig.holder.sequence == 10
    rig.holder.apply(update(11, removed=pages(3, 4)))
    assert rig.depth == 3
    rig.holder.apply(update(11))  # nothing was missed
    for wrong in (
        update(13),
        update(11, removed=pages(0, 1)),
        update(12, epoch=Epoch(1, 2)),
        update(11, epoch=Epoch(1, 2)),
    ):
        with pytest.raises(PageGap):
            rig.holder.apply(wrong)
    assert rig.depth == 3 and rig.holder.sequence == 11, "what is known stays until there is better"
    with pytest.raises(PageGap):
        Rig().holder.apply(update(1))


def test_new_snapshot_replaces_known_pages_atomically(rig: Rig) -> None:
    rig.start()
    former = rig.holder.number
    rig.holder.apply(update(20, snapshot=True, stored=pages(0, 3)))
    assert rig.depth == 10
    rig.holder.apply(update(20, snapshot=True, complete=True, stored=pages(3, 6)))
    assert rig.depth == 6 and rig.holder.number != former and rig.directory.present == 1
    rig.holder.apply(update(21, stored=pages(6, 7)))
    assert rig.depth == 7


def test_incomplete_snapshot_is_dropped(rig: Rig) -> None:
    rig.start()
    rig.holder.apply(update(20, snapshot=True, stored=pages(0, 12)))
    rig.holder.restart()
    assert rig.depth == 10 and rig.directory.present == 1
    rig.holder.apply(update(20, snapshot=True, stored=pages(0, 2)))
    rig.holder.apply(update(22, snapshot=True, complete=True, stored=pages(0, 4)))
    assert rig.depth == 4, "the parts are of one snapshot"


def test_new_epoch_forgets_the_old_pages_at_once(rig: Rig) -> None:
    rig.start()
    rig.holder.apply(update(3, epoch=Epoch(2, 1), snapshot=True, stored=pages(0, 2)))
    assert rig.holder.number == -1 and rig.numbers[-1] == -1
    rig.holder.apply(update(3, epoch=Epoch(2, 1), snapshot=True, complete=True))
    assert rig.depth == 2 and rig.holder.epoch == Epoch(2, 1)


def test_cleared_holder_has_no_pages_and_continues(rig: Rig) -> None:
    rig.start()
    rig.holder.apply(update(8, cleared=True))
    assert rig.depth == 0 and rig.holder.number >= 0
    rig.holder.apply(update(9, stored=pages(0, 1)))
    assert rig.depth == 1


def test_forgotten_holder_starts_again_from_a_snapshot(rig: Rig) -> None:
    rig.start()
    rig.holder.forget()
    rig.holder.forget()
    assert rig.numbers[-1] == -1 and len(rig.numbers) == 2 and rig.directory.present == 0
    for _ in rig.directory.sweep():
        pass
    assert len(rig.directory.reported) == 0
    rig.start(4)
    assert rig.depth == 4


def test_holder_is_fully_known_only_while_its_stream_is_followed(rig: Rig) -> None:
    rig.holder.apply(update(7, snapshot=True, stored=pages(0, 5)))
    assert rig.life == 0, "half of a snapshot"
    rig.holder.apply(update(7, snapshot=True, complete=True, stored=pages(5, 9)))
    assert rig.life == LIFE.boot_id
    rig.holder.apply(update(8, stored=pages(9, 10)))
    assert rig.said == [(rig.holder.number, LIFE.boot_id)], "said once"
    rig.holder.restart()
    assert rig.life == 0 and rig.depth == 10, "the stream broke: nobody tells of changes, what was told is believed"
    rig.holder.apply(update(8))
    assert rig.life == LIFE.boot_id, "it goes on, and nothing was missed"
    rig.holder.apply(update(20, snapshot=True, stored=pages(0, 3)))
    assert rig.life == 0, "it has more than it can tell one by one"
    rig.holder.apply(update(20, snapshot=True, complete=True))
    assert rig.life == LIFE.boot_id
    rig.holder.apply(update(1, epoch=Epoch(2, 1), snapshot=True, stored=pages(0, 1)))
    assert rig.life == 0
    rig.holder.apply(update(1, epoch=Epoch(2, 1), snapshot=True, complete=True))
    assert rig.life == 2
    rig.holder.forget()
    assert rig.life == 0


def test_holder_is_not_fully_known_after_a_gap(rig: Rig) -> None:
    rig.start()
    with pytest.raises(PageGap):
        rig.holder.apply(update(13))
    rig.holder.restart()
    assert rig.life == 0


def test_empty_change_within_a_snapshot_is_a_gap(rig: Rig) -> None:
    rig.start()
    rig.holder.apply(update(9, snapshot=True, stored=pages(0, 3)))
    with pytest.raises(PageGap):
        rig.holder.apply(update(7))
    assert rig.life == 0, "the changes up to 9 are missing"


def test_pages_stay_known_until_the_snapshot_after_a_gap(rig: Rig) -> None:
    rig.start()
    with pytest.raises(PageGap):
        rig.holder.apply(update(13))
    rig.holder.restart()
    rig.holder.require_snapshot()
    assert rig.holder.epoch is None, "the stream begins anew"
    rig.holder.apply(update(13, snapshot=True, stored=pages(0, 3)))
    assert rig.depth == 10 and rig.life == 0
    rig.holder.apply(update(13, snapshot=True, complete=True, stored=pages(3, 6)))
    assert rig.depth == 6 and rig.life == LIFE.boot_id


def test_dropped_pages_make_the_holder_incomplete_until_the_next_snapshot() -> None:
    rig = Rig()
    many = [hashlib.sha256(b"%d" % i).digest() for i in range(2000)]
    rig.start()
    assert rig.life == LIFE.boot_id
    rig.holder.apply(update(8, stored=(Pool(NS, 0, many),)))
    assert rig.life == 0 and rig.directory.dropped > 0
    rig.holder.apply(update(9, removed=(Pool(NS, 0, many),)))
    assert rig.life == 0, "nobody tells again of those that were dropped"
    rig.holder.apply(update(9, snapshot=True, complete=True, stored=pages(0, 9)))
    assert rig.life == LIFE.boot_id
