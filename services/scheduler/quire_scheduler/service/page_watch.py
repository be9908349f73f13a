"""WatchPages: which named pages the worker holds: a snapshot, then the tail, as joined frames.

Every watcher reads at its own pace from the bounded tail, so that nothing is queued for it. One that is too slow, or
that saw another epoch, gets a new snapshot. A snapshot is read piece by piece while pages change: what the tail says
from its sequence on makes it right.
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
        """Yield frames to one watcher, for ever. Raises Overloaded where too many watch already."""
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
    """One watcher: `_core` is whose pages it hears of, `_at` the sequence that it has heard; -1: nothing."""

    def __init__(self, engine: Engine, request: common_pb2.WatchPagesRequest) -> None:
        self._engine = engine
        self._request = request
        self._interval_s = min(request.interval_ms, _MOST_INTERVAL_MS) / 1000
        self._core: Scheduler | None = None
        self._at = -1
        # It is to hear that it goes on from where it was: then silence means that nothing changes.
        self._resumed = False

    async def frames(self) -> AsyncIterator[common_pb2.PageEvents]:
        """Yield a snapshot of the worker's named pages and then their changes, at most once per interval; after a gap,
        a snapshot again. When an epoch ends, a frame says that nothing is held. Without a worker nothing is yielded."""
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
                    events = core.names.after(self._at)
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
        """Follow the core from now on. A request that names this core's epoch resumes after its sequence; others get a
        snapshot."""
        request = self._request
        resumes = core is not None and request.HasField("epoch") and epoch_from_pb(request.epoch) == core.hello.epoch
        self._core, self._at, self._resumed = core, request.after_sequence if resumes else -1, resumes

    async def _snapshot(self, core: Scheduler) -> AsyncIterator[common_pb2.PageEvents]:
        """Yield all named pages as one or more frames, the last of which is marked complete. Stops without that mark if
        the epoch ends meanwhile."""
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
    """Domain to wire. `since_s`: when the changes began, for their age."""

    def __init__(self, core: Scheduler, with_token_ids: bool, since_s: float | None = None) -> None:
        pages = core.hello.model.pages
        self._epoch = epoch_to_pb(core.hello.epoch)
        self._namespace = pages.namespace
        self._one_group = len(pages.groups) == 1
        self._with_token_ids = with_token_ids
        age_s = 0.0 if since_s is None else asyncio.get_running_loop().time() - since_s
        self._age_us = min(max(int(age_s * 1e6), 0), _MOST_AGE_US)

    def event(self, event: PageEvent) -> common_pb2.PageEvents:
        """Build the frame of one change."""
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
        """Build a frame that tells of stored pages."""
        return common_pb2.PageEvents(
            epoch=self._epoch,
            sequence=sequence,
            snapshot=snapshot,
            snapshot_complete=snapshot_complete,
            stored=map(self._stored, stored),
            age_us=self._age_us,
        )

    def _stored(self, chain: Stored) -> common_pb2.StoredPages:
        """Convert a chain of named pages to the wire; without token ids unless the watcher wants them."""
        return common_pb2.StoredPages(
            namespace=self._namespace,
            group=chain.group,
            parent=chain.parent,
            hashes=chain.hashes,
            medium=DEVICE_TIER,
            token_ids=chain.tokens if self._with_token_ids else b"",
        )
