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
    watcher = feed.add_watcher()
    feed.publish([RUN.key(0)], [b""])
    feed.publish(removed=[RUN.key(0)])
    feed.publish()
    watcher.at = 0
    changes = watcher.wait_for_changes()
    assert changes is not None and [(c.sequence, c.stored, c.removed) for c in changes] == [
        (1, (RUN.key(0),), ()),
        (2, (), (RUN.key(0),)),
    ]
    assert feed.sequence == 2, "no change has no number"


def test_a_slow_watcher_falls_behind_and_restarts_alone() -> None:
    feed = PageFeed(2, 3)
    slow, quick = feed.add_watcher(0), feed.add_watcher(0)
    for index in range(5):
        feed.publish([RUN.key(index)], [b""])
        changes = quick.wait_for_changes()
        assert changes is not None and [change.sequence for change in changes] == [index + 1]
    assert slow.wait_for_changes() is None and not slow.closed, "the tail is too short: it needs a snapshot"
    assert slow.wait_for_changes() is None
    assert slow.start_snapshot() == 5
    feed.publish([RUN.key(5)], [b""])
    changes = slow.wait_for_changes()
    assert changes is not None and [change.sequence for change in changes] == [6]


def test_a_place_that_the_tail_never_had_needs_a_snapshot() -> None:
    feed = PageFeed(4, 3)
    assert feed.add_watcher(7).wait_for_changes() is None
    feed.publish([RUN.key(0)], [b""])
    assert feed.add_watcher(-1).wait_for_changes() is None
    changes = feed.add_watcher(0).wait_for_changes()
    assert changes is not None and len(changes) == 1


def test_a_pause_gathers_changes_and_ends_with_the_feed() -> None:
    feed = PageFeed(2, 10)
    watcher = feed.add_watcher(0)
    results: list[object] = []
    thread = threading.Thread(target=lambda: results.append(watcher.wait_for_changes(3600.0)))
    thread.start()
    feed.publish([RUN.key(0)], [b""])
    watcher.close()
    thread.join(30)
    assert results == [None]


def test_closing_wakes_a_waiting_watcher() -> None:
    feed = PageFeed(2, 3)
    watcher = feed.add_watcher(0)
    results: list[object] = []
    thread = threading.Thread(target=lambda: results.append(watcher.wait_for_changes()))
    thread.start()
    feed.close()
    thread.join(30)
    assert results == [None] and watcher.closed
    assert feed.add_watcher().closed, "nobody waits on a feed that has ended"


def test_watchers_are_bounded_and_leave_room() -> None:
    feed = PageFeed(1, 3)
    watcher = feed.add_watcher()
    with pytest.raises(Overloaded) as caught:
        feed.add_watcher()
    assert caught.value.code == "TOO_MANY_WATCHERS"
    feed.remove_watcher(watcher)
    feed.remove_watcher(watcher)
    feed.add_watcher()
