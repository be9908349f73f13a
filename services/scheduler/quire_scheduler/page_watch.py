"""WatchPages: which named pages the worker holds: a snapshot, then the tail; a watcher that is too slow, or that saw
another epoch, gets a new snapshot. Every watcher reads at its own pace from the bounded tail: nothing is queued for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire.v1 import common_pb2
from quire_common.credit.hello import epoch_from_pb, epoch_to_pb
from quire_common.errors import FailedPrecondition
from quire_scheduler.page_names import MEDIUM, PageEvent, Stored

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from quire_scheduler.engine import Engine
    from quire_scheduler.scheduler import Scheduler

_PAGES_PER_FRAME = 1024


async def watch_pages(engine: Engine, request: common_pb2.WatchPagesRequest) -> AsyncIterator[common_pb2.PageEvents]:
    """Frames for one watcher, for ever. While there is no worker, there are no pages."""
    core: Scheduler | None = None
    at = -1
    while True:
        current = engine.core
        if current is None:
            if core is not None:
                yield common_pb2.PageEvents(epoch=epoch_to_pb(core.hello.epoch), sequence=at + 1, cleared=True)
            core = None
            await engine.page_bell.wait()
            continue
        if current is not core:
            core = current
            resumes = request.HasField("epoch") and epoch_from_pb(request.epoch) == core.hello.epoch
            at = request.after_sequence if resumes else -1
        frames = _Frames(core, request.with_token_ids)
        try:
            if at < 0:
                raise FailedPrecondition("NO_POSITION", "The watcher is new.", "It gets a snapshot.")
            events = core.names.after(at)
        except FailedPrecondition:
            at, snapshot = core.names.sequence, core.names.snapshot()
            for frame in frames.snapshot(at, snapshot):
                yield frame
            continue
        for event in events:
            yield frames.event(event)
            at = event.sequence
        if not events:
            await engine.page_bell.wait()


class _Frames:
    """Domain to wire."""

    def __init__(self, core: Scheduler, with_token_ids: bool) -> None:
        pages = core.hello.model.pages
        self._epoch = epoch_to_pb(core.hello.epoch)
        self._namespace = pages.namespace
        self._one_group = len(pages.groups) == 1
        self._page_bytes = 4 * pages.page_size
        self._with_token_ids = with_token_ids

    def snapshot(self, sequence: int, stored: list[Stored]) -> Iterator[common_pb2.PageEvents]:
        """At least one frame; the last says that it is."""
        pieces = [piece for chain in stored for piece in _cut(chain, self._page_bytes)]
        for index, piece in enumerate(pieces):
            last = index == len(pieces) - 1
            yield self._frame(sequence, snapshot=True, snapshot_complete=last, stored=[self._stored(piece)])
        if not pieces:
            yield self._frame(sequence, snapshot=True, snapshot_complete=True)

    def event(self, event: PageEvent) -> common_pb2.PageEvents:
        """One change."""
        frame = self._frame(event.sequence, stored=[self._stored(chain) for chain in event.stored])
        for removed in event.removed:
            if self._one_group:
                frame.removed.extend(removed.hashes)
            else:
                frame.removed_pages.add(namespace=self._namespace, group=removed.group, hashes=removed.hashes)
        return frame

    def _frame(
        self,
        sequence: int,
        *,
        snapshot: bool = False,
        snapshot_complete: bool = False,
        stored: list[common_pb2.StoredPages] | None = None,
    ) -> common_pb2.PageEvents:
        return common_pb2.PageEvents(
            epoch=self._epoch, sequence=sequence, snapshot=snapshot, snapshot_complete=snapshot_complete, stored=stored
        )

    def _stored(self, chain: Stored) -> common_pb2.StoredPages:
        return common_pb2.StoredPages(
            namespace=self._namespace,
            group=chain.group,
            parent=chain.parent,
            hashes=chain.hashes,
            medium=MEDIUM,
            token_ids=chain.tokens if self._with_token_ids else b"",
        )


def _cut(chain: Stored, page_bytes: int) -> Iterator[Stored]:
    """Pieces of bounded size; each names the page before it as its parent."""
    for start in range(0, len(chain.hashes), _PAGES_PER_FRAME):
        end = start + _PAGES_PER_FRAME
        parent = chain.hashes[start - 1] if start else chain.parent
        tokens = chain.tokens[start * page_bytes : end * page_bytes]
        yield Stored(chain.group, parent, chain.hashes[start:end], tokens)
