"""WatchPages, frame by frame, over real names of pages and an engine that comes and goes."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from quire.v1 import common_pb2 as pb
from quire_common.credit import WorkerHello
from quire_common.credit.hello import Epoch
from quire_common.errors import Overloaded
from quire_scheduler.config import SchedulerConfig
from quire_scheduler.kv.page_names import PageNames
from quire_scheduler.service.page_watch import PageWatches
from quire_scheduler.service.wake_event import WakeEvent
from tests.fakes.worker.fake_worker import make_hello
from tests.tiers import deep_after

LIMIT_S = 60.0
TAIL = 4


@dataclass
class Core:
    hello: WorkerHello
    names: PageNames


@dataclass
class Engine:
    """As much of the scheduler's engine as a watch sees."""

    config: SchedulerConfig = field(default_factory=lambda: SchedulerConfig(max_page_watchers=2))
    core: Core | None = None
    pages_changed: WakeEvent = field(default_factory=WakeEvent)
    runs: int = 0

    def attach(self, tail: int = TAIL) -> PageNames:
        self.runs += 1
        hello = make_hello()
        object.__setattr__(hello, "epoch", Epoch(boot_id=5, run=self.runs))
        self.core = Core(hello, PageNames(1, tail))
        self.core.names.listeners.append(self.pages_changed.set)
        self.pages_changed.set()
        return self.core.names

    def detach(self) -> None:
        self.core = None
        self.pages_changed.set()


class Watch:
    """A watcher that keeps what it was told, as the contract says."""

    def __init__(self, engine: Engine, watches: PageWatches | None = None, **request: Any) -> None:
        watches = watches or PageWatches(cast("Any", engine))
        self.frames: AsyncIterator[pb.PageEvents] = watches.watch(pb.WatchPagesRequest(**request))
        self.held: set[bytes] = set()
        self.at = 0
        self.whole = False

    async def next(self) -> pb.PageEvents:
        frame = await asyncio.wait_for(anext(self.frames), LIMIT_S)
        if frame.cleared or (frame.snapshot and frame.sequence != self.at):
            self.held.clear()
        if not frame.snapshot and not frame.cleared:
            assert (frame.first_sequence or frame.sequence) == self.at + 1, "the tail has no gap"
        self.held.update(digest for chain in frame.stored for digest in chain.hashes)
        self.held.difference_update(frame.removed)
        self.at = frame.sequence
        self.whole = frame.snapshot_complete or not frame.snapshot
        return frame

    async def close(self) -> None:
        await cast("Any", self.frames).aclose()


def name(names: PageNames, *pages: int) -> None:
    for page in pages:
        names.name(0, [page], b"", [bytes([page])], b"t")


async def test_changes_since_the_last_frame_come_as_one() -> None:
    engine = Engine()
    names = engine.attach()
    watch = Watch(engine)
    assert (await watch.next()).snapshot_complete
    name(names, 1, 2, 3)
    frame = await watch.next()
    assert (frame.first_sequence, frame.sequence, watch.held) == (1, 3, {b"\1", b"\2", b"\3"})
    assert not frame.stored[0].token_ids
    names.forget(0, [2])
    name(names, 2)
    await watch.next()
    await watch.next()
    assert watch.at == 5 and b"\2" in watch.held, "stored again: not in the frame that removed it"
    await watch.close()


async def test_a_slow_watcher_gets_a_snapshot_and_goes_on() -> None:
    engine = Engine()
    names = engine.attach()
    watch = Watch(engine)
    await watch.next()
    name(names, *range(1, TAIL + 3))
    frame = await watch.next()
    assert frame.snapshot_complete and frame.sequence == TAIL + 2 and len(watch.held) == TAIL + 2
    names.forget(0, [1])
    frame = await watch.next()
    assert not frame.snapshot and list(frame.removed) == [b"\1"]
    await watch.close()


async def test_resuming_watcher_gets_the_tail_alone_while_it_is_kept() -> None:
    engine = Engine()
    names = engine.attach()
    name(names, *range(1, 8))
    epoch = pb.Epoch(boot_id=5, run=1)
    watch = Watch(engine, epoch=epoch, after_sequence=5)
    watch.at = 5
    assert (await watch.next()).sequence == 7 and watch.held == {b"\6", b"\7"}
    await watch.close()
    watch = Watch(engine, epoch=epoch, after_sequence=7)
    word = await anext(watch.frames)
    assert word == pb.PageEvents(epoch=epoch, sequence=7), "nothing was missed"
    watch.at = 7
    names.forget(0, [7])
    assert (await watch.next()).sequence == 8
    name(names, 7)
    await watch.close()
    # Too old, from the future, of another life.
    for old in ((epoch, 1), (epoch, 90), (pb.Epoch(boot_id=5, run=2), 5), (pb.Epoch(boot_id=6, run=1), 5)):
        watch = Watch(engine, epoch=old[0], after_sequence=old[1])
        assert (await watch.next()).snapshot_complete and len(watch.held) == 7
        await watch.close()


async def test_a_new_epoch_clears_and_starts_anew() -> None:
    engine = Engine()
    watch = Watch(engine, epoch=pb.Epoch(boot_id=5, run=1), after_sequence=0)
    first = asyncio.ensure_future(watch.next())
    await asyncio.sleep(0)
    name(engine.attach(), 1, 2)
    assert (await first).epoch.run == 1 and watch.held == {b"\1", b"\2"}, "the named epoch, from its beginning"
    engine.detach()
    frame = await watch.next()
    assert frame.cleared and frame.epoch.run == 1 and not watch.held
    engine.attach()
    frame = await watch.next()
    assert frame.snapshot_complete and frame.epoch.run == 2 and not frame.stored
    # Replaced between two looks.
    names = engine.attach()
    name(names, 9)
    assert (await watch.next()).cleared
    assert (await watch.next()).epoch.run == 3 and watch.held == {b"\x09"}
    await watch.close()


async def test_page_watchers_are_bounded() -> None:
    engine = Engine()
    engine.attach()
    watches = PageWatches(cast("Any", engine))
    open_ones = [Watch(engine, watches) for _ in range(2)]
    for watch in open_ones:
        await watch.next()
    with pytest.raises(Overloaded) as caught:
        await Watch(engine, watches).next()
    assert caught.value.code == "TOO_MANY_WATCHERS"
    await open_ones[0].close()
    await Watch(engine, watches).next()


async def test_a_watcher_may_ask_for_fewer_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses_s, passed, sleep = list[float](), asyncio.Event(), asyncio.sleep

    async def pause(delay_s: float) -> None:
        pauses_s.append(delay_s)
        await passed.wait()

    monkeypatch.setattr("quire_scheduler.service.page_watch.asyncio.sleep", pause)
    engine = Engine()
    names = engine.attach(tail=100)
    watch = Watch(engine, interval_ms=1500)
    await watch.next()
    coming = asyncio.ensure_future(watch.next())
    for _ in range(10):  # until the watcher waits for changes
        await sleep(0)
    for page in range(1, 21):
        name(names, page)
        await sleep(0)
    assert len(pauses_s) == 1 and 0 < pauses_s[0] <= 1.5 and not coming.done()
    passed.set()
    frame = await coming
    assert frame.first_sequence == 1 and frame.sequence == 20, "all came within the interval"
    assert 0 < frame.age_us < 60e6
    await watch.close()


@pytest.mark.parametrize("seed", deep_after(5, range(20)))
async def test_watcher_converges_while_pages_change_during_snapshots(seed: int) -> None:
    rng = random.Random(seed)
    engine = Engine()
    names = engine.attach(tail=64)
    held: dict[int, bytes] = {}

    def change() -> None:
        for _ in range(rng.randrange(90)):
            page = rng.randrange(1, 4000)
            digest = (page % 3500).to_bytes(32, "big")
            if page in held:
                names.forget(0, [page])
                del held[page]
            elif digest not in held.values():
                names.name(0, [page], b"", [digest], b"t")
                held[page] = digest

    for page in range(1, 3000):
        held[page] = page.to_bytes(32, "big")
        names.name(0, [page], b"", [held[page]], b"t")
    watch = Watch(engine)
    snapshots = 0
    for _ in range(12):
        snapshots += (await watch.next()).snapshot_complete
        change()
    name(names, 0)  # so that there is something to hear
    while watch.at < names.sequence or not watch.whole:
        await watch.next()
    assert snapshots and watch.held == {*held.values(), b"\0"}
    await watch.close()
