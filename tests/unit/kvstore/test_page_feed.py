"""Watchers: order, bounds, new snapshots."""

from __future__ import annotations

import threading

import pytest

from quire_common.errors import Overloaded
from quire_kvstore.page_feed import PageFeed
from tests.unit.kvstore.pages import chain

RUN = chain("a", 8)


def test_changes_come_numbered_and_in_order() -> None:
    feed = PageFeed(2, 10)
    watcher = feed.open()
    feed.publish([RUN.key(0)], [b""])
    feed.publish(removed=[RUN.key(0)])
    feed.publish()
    watcher.at = 0
    changes = watcher.next()
    assert changes is not None and [(c.sequence, c.stored, c.removed) for c in changes] == [
        (1, (RUN.key(0),), ()),
        (2, (), (RUN.key(0),)),
    ]
    assert feed.sequence == 2, "no change has no number"


def test_a_slow_watcher_falls_behind_and_restarts_alone() -> None:
    feed = PageFeed(2, 3)
    slow, quick = feed.open(0), feed.open(0)
    for index in range(5):
        feed.publish([RUN.key(index)], [b""])
        changes = quick.next()
        assert changes is not None and [change.sequence for change in changes] == [index + 1]
    assert slow.next() is None and not slow.closed, "the tail is too short: it needs a snapshot"
    assert slow.next() is None
    assert slow.restart() == 5
    feed.publish([RUN.key(5)], [b""])
    changes = slow.next()
    assert changes is not None and [change.sequence for change in changes] == [6]


def test_a_place_that_the_tail_never_had_needs_a_snapshot() -> None:
    feed = PageFeed(4, 3)
    assert feed.open(7).next() is None
    feed.publish([RUN.key(0)], [b""])
    assert feed.open(-1).next() is None
    changes = feed.open(0).next()
    assert changes is not None and len(changes) == 1


def test_a_pause_gathers_changes_and_ends_with_the_feed() -> None:
    feed = PageFeed(2, 10)
    watcher = feed.open(0)
    results: list[object] = []
    thread = threading.Thread(target=lambda: results.append(watcher.next(3600.0)))
    thread.start()
    feed.publish([RUN.key(0)], [b""])
    watcher.close()
    thread.join(30)
    assert results == [None]


def test_closing_wakes_a_waiting_watcher() -> None:
    feed = PageFeed(2, 3)
    watcher = feed.open(0)
    results: list[object] = []
    thread = threading.Thread(target=lambda: results.append(watcher.next()))
    thread.start()
    feed.close()
    thread.join(30)
    assert results == [None] and watcher.closed
    assert feed.open().closed, "nobody waits on a feed that has ended"


def test_watchers_are_bounded_and_leave_room() -> None:
    feed = PageFeed(1, 3)
    watcher = feed.open()
    with pytest.raises(Overloaded) as caught:
        feed.open()
    assert caught.value.code == "TOO_MANY_WATCHERS"
    feed.drop(watcher)
    feed.drop(watcher)
    feed.open()
