"""The Watch stream of one peer: a snapshot, or a word that nothing was missed, then the tail, as joined frames."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from quire.v1 import common_pb2
from quire_common.kv.page_events import FRAME_PAGES, joined
from quire_kvstore.ram_tier import RAM

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    import grpc

    from quire_common.pages import PageKey
    from quire_kvstore.page_feed import PageChange
    from quire_kvstore.page_store import PageStore

_MOST_INTERVAL_MS = 60_000


def watch_pages(
    store: PageStore,
    epoch: common_pb2.Epoch,
    request: common_pb2.WatchPagesRequest,
    context: grpc.ServicerContext,
) -> Iterator[common_pb2.PageEvents]:
    """Yield frames until the peer leaves or the store drains: a snapshot, then changes, at most one batch per
    `interval_ms` (60 s at most). A peer that resumes in this epoch gets no snapshot while the tail has all changes
    after its number. If such a peer missed nothing, it gets an empty frame at once. When the tail has lost changes, a
    new snapshot follows. Blocks its thread. Raises Overloaded if there are too many watchers."""
    resumes = request.HasField("epoch") and request.epoch == epoch
    interval_s = min(request.interval_ms, _MOST_INTERVAL_MS) / 1000
    watcher = store.open_watch(request.after_sequence if resumes else -1)
    try:
        if not context.add_callback(watcher.close):
            return
        sent_s = time.monotonic()
        if resumes and watcher.is_current:
            yield common_pb2.PageEvents(epoch=epoch, sequence=watcher.at)
        while not watcher.closed:
            if watcher.at < 0:
                yield from _snapshot(epoch, *store.snapshot(watcher))
            while (changes := watcher.wait_for_changes(sent_s + interval_s - time.monotonic())) is not None:
                since_s, sent_s = sent_s, time.monotonic()
                # They came after the last frame: that is all that is known, and little is waited beyond `interval_s`.
                age_us = int(min(sent_s - since_s, interval_s) * 1e6)
                yield from joined(_change(epoch, change, age_us) for change in changes)
            watcher.lose_place()
    finally:
        store.close_watch(watcher)


def _snapshot(
    epoch: common_pb2.Epoch, sequence: int, held: Mapping[str, Sequence[PageKey]]
) -> Iterator[common_pb2.PageEvents]:
    """Yield all held pages with their tier, in frames of at most `FRAME_PAGES` pages, and mark the last frame as
    complete. An empty store also yields one frame."""
    frames = [
        (tier, keys[start : start + FRAME_PAGES])
        for tier, keys in held.items()
        for start in range(0, len(keys), FRAME_PAGES)
    ] or [(RAM, [])]
    for number, (tier, part) in enumerate(frames, 1):
        yield common_pb2.PageEvents(
            epoch=epoch,
            sequence=sequence,
            snapshot=True,
            snapshot_complete=number == len(frames),
            stored=[
                common_pb2.StoredPages(namespace=namespace, group=group, hashes=hashes, medium=tier)
                for (namespace, group), hashes in _by_pool(part).items()
            ],
        )


def _change(epoch: common_pb2.Epoch, change: PageChange, age_us: int) -> common_pb2.PageEvents:
    """Build the frame of one change. A stored page whose parent is the stored page before it shares that page's entry.
    Removed pages are grouped by namespace and group."""
    events = common_pb2.PageEvents(epoch=epoch, sequence=change.sequence, age_us=age_us)
    last = b""
    for key, parent in zip(change.stored, change.parents, strict=True):
        if not events.stored or parent != last:
            events.stored.add(namespace=key.namespace, group=key.group, parent=parent, medium=RAM)
        events.stored[-1].hashes.append(key.hash)
        last = key.hash
    for (namespace, group), hashes in _by_pool(change.removed).items():
        events.removed_pages.add(namespace=namespace, group=group, hashes=hashes)
    return events


def _by_pool(keys: Iterable[PageKey]) -> dict[tuple[bytes, int], list[bytes]]:
    """Group the pages' hashes by namespace and group."""
    pools: dict[tuple[bytes, int], list[bytes]] = {}
    for key in keys:
        pools.setdefault((key.namespace, key.group), []).append(key.hash)
    return pools
