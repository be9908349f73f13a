"""WatchPages: tells watchers which named pages the worker holds. A watcher gets a snapshot first, then the changes.

Every watcher reads the changes at its own pace from a bounded list of recent events, so that nothing is queued for it.
A watcher that falls behind the list, or that followed another epoch, gets a new snapshot. A snapshot is read in pieces
while pages change; the events after the sequence number at its beginning correct it.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from quire.v1 import common_pb2
from quire_common.credit.hello import epoch_from_pb, epoch_to_pb
from quire_common.errors import FailedPrecondition, Overloaded
from quire_common.kv.page_events import joined
from quire_scheduler import metrics
from quire_scheduler.kv.page_names import DEVICE_TIER, PageEvent, Stored

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable

    from quire_scheduler.core.scheduler import Scheduler
    from quire_scheduler.service.engine import Engine

_MOST_INTERVAL_MS = 60_000
_MOST_AGE_US = (1 << 32) - 1


class PageWatches:
    """All watchers of one scheduler."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._open = 0

    async def watch(self, request: common_pb2.WatchPagesRequest) -> AsyncIterator[common_pb2.PageEvents]:
        """Yield to one watcher, for ever, a snapshot of the named pages (none may be needed if the watcher resumes) and
        then their changes. Raises Overloaded if there are --max-page-watchers watchers already. The watcher is counted
        until the stream is closed."""
        most = self._engine.config.max_page_watchers
        if self._open >= most:
            raise Overloaded(
                "TOO_MANY_WATCHERS",
                f"{most} peers watch this scheduler's pages already.",
                "Retry later, watch through a relay, or raise --max-page-watchers.",
                retry_after_s=5.0,
            )
        self._open += 1
        metrics.page_watchers.set(self._open)
        try:
            async for frame in _Watch(self._engine, request).frames():
                yield frame
        finally:
            self._open -= 1
            metrics.page_watchers.set(self._open)


class _Watch:
    """One watcher. `_core` is the core whose pages the watcher follows; `_at` is the sequence of the last event that it
    was sent, or -1."""

    def __init__(self, engine: Engine, request: common_pb2.WatchPagesRequest) -> None:
        self._engine = engine
        self._request = request
        self._interval_s = min(request.interval_ms, _MOST_INTERVAL_MS) / 1000
        self._core: Scheduler | None = None
        self._at = -1
        # The watcher must be told that it resumes where it was; afterwards silence means that nothing changes.
        self._resumed = False

    async def frames(self) -> AsyncIterator[common_pb2.PageEvents]:
        """Yield a snapshot of the worker's named pages and then their changes, as one or more frames. Changes are
        collected until an interval has passed since the last frames; those that come while frames are sent follow at
        once. After a gap, yield a snapshot again. A watcher that resumes in the same epoch gets a frame at once
        and, while the list has all later events, no snapshot. When an epoch ends, yield a frame that says that no pages
        are held. While there is no worker, yield nothing."""
        clock = asyncio.get_running_loop().time
        changed_s = sent_s = clock()
        while True:
            if self._engine.core is not self._core:
                if self._core is not None:
                    yield common_pb2.PageEvents(
                        epoch=epoch_to_pb(self._core.hello.epoch), sequence=self._at + 1, cleared=True
                    )
                self._attach(self._engine.core)
                continue
            core, events = self._core, list[PageEvent]()
            if core is not None:
                try:
                    events = core.names.events_after(self._at)
                except FailedPrecondition:
                    async for frame in self._snapshot(core):
                        yield frame
                    continue
            resumed, self._resumed = self._resumed, False
            if core is not None and resumed and not events:
                yield _Wire(core, self._request.with_token_ids).frame(self._at)
                continue
            if not events or core is None:
                await self._engine.pages_changed.wait()
                changed_s = clock()
                await asyncio.sleep(max(sent_s + self._interval_s - changed_s, 0.0))
                continue
            wire = _Wire(core, self._request.with_token_ids, changed_s)
            for frame in joined(map(wire.event, events)):
                yield frame
                self._at = frame.sequence
            changed_s = sent_s = clock()

    def _attach(self, core: Scheduler | None) -> None:
        """Follow this core from now on. A watcher whose request names this core's epoch resumes after the sequence in
        the request; any other gets a snapshot."""
        request = self._request
        resumes = core is not None and request.HasField("epoch") and epoch_from_pb(request.epoch) == core.hello.epoch
        self._core, self._at, self._resumed = core, request.after_sequence if resumes else -1, resumes

    async def _snapshot(self, core: Scheduler) -> AsyncIterator[common_pb2.PageEvents]:
        """Yield all named pages as one or more frames; the last one is marked complete. The snapshot is counted as new
        or after a gap, and the watcher then follows the events that are later than its beginning. If the epoch ends
        meanwhile, stop without that mark."""
        metrics.page_snapshots.labels("new" if self._at < 0 else "gap").inc()
        self._at = core.names.sequence
        wire, held = _Wire(core, self._request.with_token_ids), list[Stored]()
        for piece in core.names.snapshot():
            if held:
                yield wire.frame(self._at, snapshot=True, stored=held)
                if self._engine.core is not core:
                    return
            held = piece
        yield wire.frame(self._at, snapshot=True, snapshot_complete=True, stored=held)


class _Wire:
    """Converts page events to messages. `since_s` is the time when the changes began, from which their age is
    computed."""

    def __init__(self, core: Scheduler, with_token_ids: bool, since_s: float | None = None) -> None:
        pages = core.hello.model.pages
        self._epoch = epoch_to_pb(core.hello.epoch)
        self._namespace = pages.namespace
        self._one_group = len(pages.groups) == 1
        self._with_token_ids = with_token_ids
        age_s = 0.0 if since_s is None else asyncio.get_running_loop().time() - since_s
        self._age_us = min(max(int(age_s * 1e6), 0), _MOST_AGE_US)

    def event(self, event: PageEvent) -> common_pb2.PageEvents:
        """Build the frame of one change: its stored chains and its removed pages. If the model has several KV groups,
        removed pages are listed with their group."""
        frame = self.frame(event.sequence, stored=event.stored)
        for removed in event.removed:
            if self._one_group:
                frame.removed.extend(removed.hashes)
            else:
                frame.removed_pages.add(namespace=self._namespace, group=removed.group, hashes=removed.hashes)
        return frame

    def frame(
        self, sequence: int, *, snapshot: bool = False, snapshot_complete: bool = False, stored: Iterable[Stored] = ()
    ) -> common_pb2.PageEvents:
        """Build a frame with this epoch, the sequence and the age of the changes, which lists stored pages. `snapshot`:
        the frame is part of a snapshot; `snapshot_complete`: it is the last part."""
        return common_pb2.PageEvents(
            epoch=self._epoch,
            sequence=sequence,
            snapshot=snapshot,
            snapshot_complete=snapshot_complete,
            stored=map(self._stored, stored),
            age_us=self._age_us,
        )

    def _stored(self, chain: Stored) -> common_pb2.StoredPages:
        """Convert a chain of named pages to its message. Token ids are left out unless the watcher asked for them."""
        return common_pb2.StoredPages(
            namespace=self._namespace,
            group=chain.group,
            parent=chain.parent,
            hashes=chain.hashes,
            medium=DEVICE_TIER,
            token_ids=chain.tokens if self._with_token_ids else b"",
        )
