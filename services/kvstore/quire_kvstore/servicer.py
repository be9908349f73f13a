"""KvStoreServicer: the KvStore contract. Each RPC is one short method that decodes protobuf, calls the store and
encodes the answer."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from quire.v1 import common_pb2, kvstore_pb2, kvstore_pb2_grpc
from quire_common.columns import i32, pack_i32
from quire_common.errors import InvalidArgument
from quire_common.pages import PageRun
from quire_kvstore.page_store import PinnedPages
from quire_kvstore.page_watch import watch_pages
from quire_kvstore.puts import MAX_FRAME_BYTES
from quire_kvstore.ram_tier import RAM

if TYPE_CHECKING:
    from collections.abc import Iterator

    import grpc

    from quire_kvstore.page_store import PageStore
    from quire_kvstore.store_stats import TierStats
    from quire_kvstore.stream_limiter import StreamLimiter

# Of the time that a caller leaves, the part that its lookup may wait for pages.
_WAIT_SHARE = 0.6


@dataclass(frozen=True)
class DataEndpoints:
    """The ways of pages beside gRPC: the arena's socket and the data port. They are empty and 0 if there is none."""

    arena: str = ""
    port: int = 0


NO_DATA_ENDPOINTS = DataEndpoints()


class KvStoreServicer(kvstore_pb2_grpc.KvStoreServicer):
    """Implements the service. Methods raise typed errors, which the interceptors turn into gRPC statuses."""

    def __init__(
        self,
        store: PageStore,
        stream_limiter: StreamLimiter,
        epoch: common_pb2.Epoch,
        endpoints: DataEndpoints = NO_DATA_ENDPOINTS,
        prefetch_s: float = 0.0,
    ) -> None:
        self._store = store
        self._stream_limiter = stream_limiter
        self._epoch = epoch
        self._endpoints = endpoints
        self._prefetch_s = prefetch_s

    def LookupAndPin(
        self, request: kvstore_pb2.LookupAndPinRequest, context: grpc.ServicerContext
    ) -> kvstore_pb2.LookupAndPinResponse:
        """Look up the longest prefix of the keys, and pin it under a lease unless `no_pin` is set. The lookup may wait
        for lower tiers, see `_wait_s`. The response says how many pages were found and the slowest tier that they came
        from (empty if there are none; otherwise `ram` with `no_pin`). If there is a lease, `direct` adds the data with
        which the caller can read the pages without gRPC (see `_fill_access`). If the caller has left, the lease is
        released, and `direct` then raises NotFound. Raises the errors of `PageStore.lookup`."""
        started = time.perf_counter()
        wait_s = self._wait_s(context)
        pages, lease = self._store.lookup(_run(request.keys), request.lease_ms, pin=not request.no_pin, wait_s=wait_s)
        if lease and not context.is_active():
            self._store.release([lease.id])  # nobody hears of it any more
        tier = lease.held.slowest_tier if lease and isinstance(lease.held, PinnedPages) else RAM
        response = kvstore_pb2.LookupAndPinResponse(
            pages=pages,
            lease=lease.id if lease else b"",
            epoch=self._epoch,
            lease_ms=lease.granted_ms if lease else 0,
            medium=tier if pages else "",
            watched=self._store.watched,
        )
        if request.direct and lease:
            self._fill_access(response, lease.id)
        response.elapsed_us = int((time.perf_counter() - started) * 1e6)
        return response

    def Attach(self, request: kvstore_pb2.AttachRequest, context: grpc.ServicerContext) -> kvstore_pb2.AttachResponse:
        """Return the data with which the holder of a lookup's lease can read its pages without gRPC (see
        `_fill_access`, also for errors)."""
        response = kvstore_pb2.AttachResponse(epoch=self._epoch)
        self._fill_access(response, request.lease)
        return response

    def Check(self, request: kvstore_pb2.CheckRequest, context: grpc.ServicerContext) -> kvstore_pb2.CheckResponse:
        """Verify one page of a lookup's lease (see `PageStore.verify_page`), and return whether it is intact. Raises
        InvalidArgument for an index that the lease does not have."""
        (index,) = self._store.readable_indices(request.lease, [request.page])
        return kvstore_pb2.CheckResponse(intact=self._store.verify_page(request.lease, index))

    def BeginPut(
        self, request: kvstore_pb2.BeginPutRequest, context: grpc.ServicerContext
    ) -> kvstore_pb2.BeginPutResponse:
        """Reserve memory for the pages that the store wants. Returns their indices, with the lease, its key and the
        addresses for sending them, and how many of the run's first pages need no other put (`admitted`). If no page is
        wanted, there is no lease. Raises the errors of `PageStore.begin_put`."""
        wanted, lease, admitted = self._store.begin_put(_run(request.keys), request.page_bytes, request.lease_ms)
        if lease is None:
            return kvstore_pb2.BeginPutResponse(epoch=self._epoch, admitted=admitted)
        return kvstore_pb2.BeginPutResponse(
            wanted=pack_i32(wanted),
            lease=lease.id,
            lease_key=lease.key,
            epoch=self._epoch,
            arena=self._endpoints.arena,
            data_port=self._endpoints.port,
            admitted=admitted,
        )

    def Put(
        self, request_iterator: Iterator[kvstore_pb2.PutFrame], context: grpc.ServicerContext
    ) -> kvstore_pb2.PutResponse:
        """Write the stream's parts of pages into the put whose lease the first frame names. Returns how many of the
        put's pages have come whole, damaged ones too. Raises InvalidArgument if no lease is named, Overloaded if too
        many streams run, and the errors of `PageStore.write`."""
        lease = b""
        with self._stream_limiter.track(context):
            for frame in request_iterator:
                lease = lease or frame.lease or _no_lease()
                self._store.write(lease, frame.page, frame.offset, frame.data)
        return kvstore_pb2.PutResponse(pages=self._store.complete_pages(lease or _no_lease()))

    def CommitPut(
        self, request: kvstore_pb2.CommitPutRequest, context: grpc.ServicerContext
    ) -> kvstore_pb2.CommitPutResponse:
        """End a put: its complete and intact pages become visible. Returns the numbers of pages stored and refused.
        Raises NotFound if the lease is unknown, has expired or is a lookup's."""
        stored, refused = self._store.commit(request.lease)
        return kvstore_pb2.CommitPutResponse(stored=stored, refused=refused)

    def Get(self, request: kvstore_pb2.GetRequest, context: grpc.ServicerContext) -> Iterator[kvstore_pb2.GetFrame]:
        """Stream the pages of the lease with the requested indices (none: all of them), in parts of at most 1 MiB. Each
        page is verified before its first part. Raises NotFound if the lease has ended or a page is damaged,
        InvalidArgument for an index out of range, Overloaded if too many streams run."""
        indices = self._store.readable_indices(request.lease, i32(request.pages, "pages").tolist())
        with self._stream_limiter.track(context):
            for index in indices:
                offset, last = 0, False
                while not last:
                    data, last = self._store.read(request.lease, index, offset, MAX_FRAME_BYTES)
                    yield kvstore_pb2.GetFrame(page=index, offset=offset, data=data, last=last)
                    offset += len(data)

    def Renew(self, request: kvstore_pb2.RenewRequest, context: grpc.ServicerContext) -> kvstore_pb2.RenewResponse:
        return kvstore_pb2.RenewResponse(lease_ms=self._store.renew(request.lease, request.lease_ms))

    def Release(
        self, request: kvstore_pb2.ReleaseRequest, context: grpc.ServicerContext
    ) -> kvstore_pb2.ReleaseResponse:
        return kvstore_pb2.ReleaseResponse(released=self._store.release(request.leases))

    def Watch(
        self, request: common_pb2.WatchPagesRequest, context: grpc.ServicerContext
    ) -> Iterator[common_pb2.PageEvents]:
        yield from watch_pages(self._store, self._epoch, request, context)

    def Stats(self, request: kvstore_pb2.StatsRequest, context: grpc.ServicerContext) -> kvstore_pb2.StatsResponse:
        """Return the fill and the counts of each tier, the numbers of leases and of puts under way, and the addresses
        of the arena and the data port."""
        stats = self._store.stats()
        return kvstore_pb2.StatsResponse(
            epoch=self._epoch,
            tiers=[_tier_stats(tier) for tier in stats.tiers],
            leases=stats.leases,
            pending_puts=stats.pending_puts,
            arena=self._endpoints.arena,
            data_port=self._endpoints.port,
        )

    def _fill_access(
        self, response: kvstore_pb2.LookupAndPinResponse | kvstore_pb2.AttachResponse, lease_id: bytes
    ) -> None:
        """Add to the response the data with which a reader of the lease can fetch the pages without gRPC: the lease's
        key and the data port. If the arena is shared, also its address, and the pages' offsets and generations in it.
        Raises NotFound if the lease is unknown, has expired or is a put's."""
        lease, offsets, generations = self._store.page_locations(lease_id)
        response.lease_key = lease.key
        response.data_port = self._endpoints.port
        if self._endpoints.arena:
            response.arena = self._endpoints.arena
            response.offsets.extend(offsets)
            response.generations.extend(generations)

    def _wait_s(self, context: grpc.ServicerContext) -> float:
        """Return how long a lookup may wait for lower tiers: `prefetch_s`, but at most 60 % of the time that the
        caller's deadline leaves."""
        remaining_s = context.time_remaining()
        return self._prefetch_s if remaining_s is None else min(self._prefetch_s, _WAIT_SHARE * remaining_s)


def _tier_stats(tier: TierStats) -> kvstore_pb2.TierStats:
    """Convert a tier's fill and counts to the protobuf message."""
    figures = tier.figures
    return kvstore_pb2.TierStats(
        medium=tier.name,
        pages=tier.pages,
        bytes=tier.used_bytes,
        capacity_bytes=tier.capacity_bytes,
        hits=figures.hits,
        misses=figures.misses,
        evictions=figures.evictions,
        stored=figures.stored,
        corrupt=figures.corrupt,
        dropped=figures.dropped,
        errors=figures.errors,
        bytes_read=figures.bytes_read,
        bytes_written=figures.bytes_written,
        available=tier.available,
    )


def _no_lease() -> NoReturn:
    raise InvalidArgument("NO_LEASE", "The stream names no lease.", "Name it in the first frame.", param="lease")


def _run(keys: kvstore_pb2.PageKeys) -> PageRun:
    return PageRun(keys.namespace, keys.group, tuple(keys.hashes))
