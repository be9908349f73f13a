"""Named pages and their events."""

from __future__ import annotations

import pytest

from quire_common.errors import FailedPrecondition
from quire_scheduler.page_names import PageNames


def test_stored_and_removed_follow_the_copies() -> None:
    names = PageNames(1, 16)
    rung = []
    names.listeners.append(lambda: rung.append(names.sequence))
    names.name(0, [4, 5], [b"a", b"b"], b"xxxxyyyy")
    names.name(0, [6], [b"a"], b"xxxx")
    names.forget(0, [4, 5, 9])
    names.forget(0, [6])
    events = names.after(0)
    assert [(e.stored, e.removed) for e in events] == [
        (((0, b"", (b"a", b"b"), b"xxxxyyyy"),), ()),
        ((), ((0, (b"b",)),)),
        ((), ((0, (b"a",)),)),
    ]
    assert rung == [1, 2, 3]
    assert names.snapshot() == [] and names.num_named == 0
    names.check_integrity()


def test_a_snapshot_joins_chains() -> None:
    names = PageNames(2, 16)
    names.name(0, [1, 2], [b"a", b"b"], b"1122")
    names.name(0, [3, 4], [b"a", b"c"], b"1133")
    names.name(1, [1], [b"a"], b"11")
    assert [(s.group, s.parent, s.hashes) for s in names.snapshot()] == [
        (0, b"", (b"a", b"b")),
        (0, b"a", (b"c",)),
        (1, b"", (b"a",)),
    ]


def test_a_tail_that_is_too_short_is_a_gap() -> None:
    names = PageNames(1, 2)
    for page in range(1, 6):
        names.name(0, [page], [bytes([page])], b"t")
    assert [event.sequence for event in names.after(3)] == [4, 5]
    assert names.after(5) == []
    for sequence in (2, 6):
        with pytest.raises(FailedPrecondition) as caught:
            names.after(sequence)
        assert caught.value.code == "PAGE_EVENTS_GAP"
