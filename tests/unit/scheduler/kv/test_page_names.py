"""Named pages and their events."""

from __future__ import annotations

import pytest

from quire_common.errors import FailedPrecondition
from quire_scheduler.kv.page_names import PageNames


def test_page_events_follow_the_names() -> None:
    names = PageNames(1, 16)
    rung = []
    names.listeners.append(lambda: rung.append(names.sequence))
    assert names.name(0, [4, 5], b"", [b"a", b"b"], b"xxxxyyyy") == [4, 5]
    assert names.name(0, [6], b"", [b"a"], b"xxxx") == [], "one page per content has the name"
    assert names.name(0, [7, 8], b"", [b"a", b"c"], b"xxxxzzzz") == [8]
    assert names.forget(0, [4, 5, 9]) == [4, 5]
    assert names.forget(0, [6]) == [] and names.forget(0, [8]) == [8]
    events = names.events_after(0)
    assert [(e.stored, e.removed) for e in events] == [
        (((0, b"", (b"a", b"b"), b"xxxxyyyy"),), ()),
        (((0, b"a", (b"c",), b"zzzz"),), ()),
        ((), ((0, (b"a", b"b")),)),
        ((), ((0, (b"c",)),)),
    ]
    assert rung == [1, 2, 3, 4]
    assert not list(names.snapshot()) and names.num_named == 0
    names.check_integrity()


def test_pages_named_later_continue_their_parents_chain() -> None:
    names = PageNames(1, 16)
    names.name(0, [1], b"", [b"a"], b"11")
    names.name(0, [2, 3], b"a", [b"b", b"c"], b"2233")
    (piece,) = names.snapshot()
    assert [(s.parent, s.hashes, s.tokens) for s in piece] == [(b"", (b"a", b"b", b"c"), b"112233")]
    assert names.pages(0) == {b"a": 1, b"b": 2, b"c": 3}


def test_snapshot_joins_pages_into_chains() -> None:
    names = PageNames(2, 16)
    names.name(0, [1, 2], b"", [b"a", b"b"], b"1122")
    names.name(0, [3, 4], b"", [b"a", b"c"], b"1133")
    names.name(1, [1], b"", [b"a"], b"11")
    assert [(s.group, s.parent, s.hashes) for piece in names.snapshot() for s in piece] == [
        (0, b"", (b"a", b"b")),
        (0, b"a", (b"c",)),
        (1, b"", (b"a",)),
    ]


def test_watcher_behind_the_bounded_tail_gets_a_gap() -> None:
    names = PageNames(1, 2)
    for page in range(1, 6):
        names.name(0, [page], b"", [bytes([page])], b"t")
    assert [event.sequence for event in names.events_after(3)] == [4, 5]
    assert names.events_after(5) == []
    for sequence in (2, 6):
        with pytest.raises(FailedPrecondition) as caught:
            names.events_after(sequence)
        assert caught.value.code == "PAGE_EVENTS_GAP"
