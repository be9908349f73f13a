"""PageStream: follows the page event stream of one scheduler or kvstore, and opens it again after it breaks.

A stream that broke resumes after its last event. Until then, the router still believes the holder's pages for a grace
period: most breaks are short, and a holder that accepts no requests gets none anyway. After the grace period, the pages
are forgotten.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import grpc

from quire.v1 import common_pb2, kvstore_pb2_grpc, scheduler_pb2_grpc
from quire_common.channel import aio_channel
from quire_common.credit.hello import epoch_from_pb, epoch_to_pb
from quire_common.errors import InvalidArgument, QuireError, from_rpc_error
from quire_common.pages import HASH_BYTES
from quire_common.telemetry.logs import get_logger
from quire_router import metrics
from quire_router.backoff import Backoff
from quire_router.pages.page_holder import PageGap, PageHolder, PageUpdate, Pool

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable

    from quire_router.config import RouterConfig

log = get_logger(__name__)
# A busy holder changes with every step: more often than this nobody needs to know, since what was just placed is
# expected anyway.
_INTERVAL_MS = 100
_MOST_BACKOFF_S = 10.0


class PageStream:
    """`service` is scheduler or kvstore."""

    def __init__(self, service: str, instance: str, address: str, config: RouterConfig, holder: PageHolder) -> None:
        self.address = address
        self.holder = holder
        self._service = service
        self._instance = instance
        self._config = config
        self._grace: asyncio.TimerHandle | None = None

    async def run(self) -> None:
        """Follow the holder's page events until cancelled, then forget the holder's pages and close the channel. A
        stream that breaks, ends or sends a malformed frame is opened again after a backoff; a malformed frame is logged
        as a warning. If events were missed, this is logged and counted, and the stream is opened again at once and
        begins with a snapshot. An exception of another kind ends this method, and nothing opens the stream
        again."""
        channel = aio_channel(self.address, self._config, self._service)
        backoff = Backoff(most_s=_MOST_BACKOFF_S)
        try:
            while True:
                try:
                    await self._follow(channel, backoff)
                    reason = "the holder ended the stream"
                except PageGap as gap:
                    metrics.page_resyncs.labels("gap").inc()
                    log.warning("page events missed", instance=self._instance, reason=str(gap))
                    self.holder.require_snapshot()
                    continue
                except grpc.aio.AioRpcError as error:
                    reason = from_rpc_error(error).message
                except QuireError as error:
                    reason = error.message
                    log.warning("page events malformed", instance=self._instance, reason=reason)
                log.debug("page events unknown", instance=self._instance, reason=reason)
                await backoff.wait()
        finally:
            self._end_grace()
            self.holder.forget()
            await channel.close()

    async def _follow(self, channel: grpc.aio.Channel, backoff: Backoff) -> None:
        """Open one stream, at the place where the last one broke if that is known, and apply its frames until it ends.
        Then, also after an error, tell the holder that the stream has ended, and start the timer of `page_grace_s`,
        after which the holder's pages are forgotten, unless the timer runs already. The first well-formed frame of a
        stream stops this timer and resets the backoff. Records open streams, complete snapshots and the age of changes
        in the metrics. Raises PageGap if events are missing, grpc.RpcError if the stream breaks, and QuireError for a
        malformed frame."""
        holder, resumed = self.holder, self.holder.epoch
        why = "new" if resumed is None else "lost"
        request = common_pb2.WatchPagesRequest(interval_ms=_INTERVAL_MS)
        if resumed is not None:
            request.epoch.CopyFrom(epoch_to_pb(resumed))
            request.after_sequence = holder.sequence
        followed = False
        try:
            async for frame in self._frames(channel, request):
                update = update_from_pb(frame)
                if not followed:
                    followed = True
                    backoff.reset()
                    self._end_grace()
                    metrics.page_streams.labels(self._service).inc()
                if frame.snapshot and frame.snapshot_complete:
                    metrics.page_resyncs.labels(why).inc()
                    why = "behind"
                if not (update.snapshot or update.is_empty):
                    metrics.page_lag.observe(frame.age_us / 1e6)
                holder.apply(update)
        finally:
            holder.restart()
            if followed:
                metrics.page_streams.labels(self._service).dec()
            if self._grace is None:
                grace_s = self._config.page_grace_s
                self._grace = asyncio.get_running_loop().call_later(grace_s, self.holder.forget)

    def _frames(
        self, channel: grpc.aio.Channel, request: common_pb2.WatchPagesRequest
    ) -> AsyncIterator[common_pb2.PageEvents]:
        """Call `Watch` of a kvstore or `WatchPages` of a scheduler; return the stream of its answers."""
        if self._service == "kvstore":
            store: AsyncIterator[common_pb2.PageEvents] = kvstore_pb2_grpc.KvStoreStub(channel).Watch(request)
            return store
        scheduler: AsyncIterator[common_pb2.PageEvents] = scheduler_pb2_grpc.SchedulerStub(channel).WatchPages(request)
        return scheduler

    def _end_grace(self) -> None:
        """Stop the timer after which the holder's pages would be forgotten."""
        if self._grace is not None:
            self._grace.cancel()
            self._grace = None


def update_from_pb(frame: common_pb2.PageEvents) -> PageUpdate:
    """Convert a frame from the wire. Stored and removed pages are grouped by namespace and group; removed pages that
    name neither get an empty namespace and group 0. A frame without a first number is a single change. Raises
    InvalidArgument for a hash that has not 32 bytes."""
    removed = _by_pool(frame.removed_pages)
    if frame.removed:
        _check_hashes(frame.removed)
        removed.append(Pool(b"", 0, frame.removed))
    return PageUpdate(
        epoch=epoch_from_pb(frame.epoch),
        first=frame.first_sequence or frame.sequence,
        last=frame.sequence,
        stored=_by_pool(frame.stored),
        removed=removed,
        snapshot=frame.snapshot,
        complete=frame.snapshot_complete,
        cleared=frame.cleared,
    )


def _by_pool(parts: Iterable[common_pb2.StoredPages | common_pb2.RemovedPages]) -> list[Pool]:
    """Join the pages of each namespace and group to one Pool. A frame may have hundreds of chains of one page, and one
    change of the index with all of them takes no longer than with one. Raises InvalidArgument as `update_from_pb`."""
    hashes: dict[tuple[bytes, int], list[bytes]] = {}
    for part in parts:
        hashes.setdefault((part.namespace, part.group), []).extend(part.hashes)
    for joined in hashes.values():
        _check_hashes(joined)
    return [Pool(namespace, group, joined) for (namespace, group), joined in hashes.items()]


def _check_hashes(hashes: Iterable[bytes]) -> None:
    wrong = set(map(len, hashes)) - {HASH_BYTES}
    if wrong:
        raise InvalidArgument("BAD_PAGE_KEY", f"A page hash has {min(wrong)} bytes.", "Send hashes of 32 bytes.")
