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
    first, second = watcher.next(), watcher.next()
    assert first is not None and (first.sequence, first.stored) == (1, (RUN.key(0),))
    assert second is not None and (second.sequence, second.removed) == (2, (RUN.key(0),))
    assert feed.sequence == 2, "no change has no number"


def test_a_slow_watcher_falls_behind_and_restarts_alone() -> None:
    feed = PageFeed(2, 3)
    slow, quick = feed.open(), feed.open()
    for index in range(5):
        feed.publish([RUN.key(index)], [b""])
        change = quick.next()
        assert change is not None and change.sequence == index + 1
    assert slow.next() is None and not slow.closed, "its queue is gone: it needs a snapshot"
    assert slow.next() is None
    slow.restart()
    feed.publish([RUN.key(5)], [b""])
    change = slow.next()
    assert change is not None and change.sequence == 6


def test_closing_wakes_a_waiting_watcher() -> None:
    feed = PageFeed(2, 3)
    watcher = feed.open()
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
