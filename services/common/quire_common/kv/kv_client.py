"""A client of the kvstore for lookups, reads and puts of framed pages: `KvClient` for threads, `AioKvClient` for
asyncio.

`get_pages` returns pages as the store sent them. Callers check each page with `quire_common.pages.check_page` and treat
PageCorrupt as a miss. All failures are QuireErrors. After any of them, the caller must compute the pages again.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import grpc

from quire.v1 import common_pb2, kvstore_pb2, kvstore_pb2_grpc
from quire_common.columns import i32, pack_i32
from quire_common.errors import QuireError, from_rpc_error
from quire_common.pages import HEADER_BYTES, frame_page
from quire_common.telemetry.tracing import continued

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Sequence

    from quire_common.kv.page_mac import PageMac
    from quire_common.pages import PageBytes, PageRun

T = TypeVar("T")
FRAME_BYTES = 1 << 20
# The store and a worker that start together do so within a few seconds.
_START_S = 5.0


@dataclass(frozen=True)
class Lookup:
    """The result of a lookup: the number of pages found, from the first of the run on, and the lease that keeps them.
    Without a page, or if the caller wanted no lease, the lease is empty. `medium` is the slowest tier from which the
    pages came, `boot_id` names the kvstore's process, and `elapsed_us` is the time that the lookup took there."""

    pages: int
    lease: bytes
    lease_ms: int
    medium: str
    boot_id: int
    elapsed_us: int
    access: LeaseAccess | None = None
    """Of a direct lookup."""


@dataclass(frozen=True)
class LeaseAccess:
    """The other ways, beside gRPC, to the pages of a lease. `arena` is empty if the store shares no memory, and
    `data_port` is 0 if it has no data port. Only a lookup has `offsets` and `generations`, one of each for each
    page."""

    lease: bytes
    key: bytes = field(default=b"", repr=False)
    arena: str = ""
    data_port: int = 0
    offsets: tuple[int, ...] = ()
    generations: tuple[int, ...] = ()


@dataclass(frozen=True)
class StartedPut:
    """The answer to `begin_put`: the indices of the pages that the store wants, and the lease under which to send them.
    If the store wants none, the lease is empty. `admitted` counts the pages of the run, from the first on, that the
    store has, is receiving or wants; there was no room for the next page. It is None if the store does not say."""

    wanted: list[int]
    access: LeaseAccess
    admitted: int | None = None


@dataclass(frozen=True)
class PutOutcome:
    """The outcome of a put: `wanted` pages were wanted by the store, of which it keeps `stored` now and has refused
    `refused`."""

    wanted: int
    stored: int
    refused: int


class TransferCancelled(Exception):  # the caller's own wish, not a failure
    """A callback of the caller raises this to cancel a transfer. The transfer ends at once, and a put leaves nothing in
    the store."""


class KvClient:
    """Blocking calls; safe to use from several threads. `timeout_s` bounds each call, unless the method takes or names
    another limit; None and 0 stand for this one."""

    def __init__(self, channel: grpc.Channel, timeout_s: float = 5.0) -> None:
        self._stub = kvstore_pb2_grpc.KvStoreStub(channel)
        self._timeout_s = timeout_s

    def lookup(
        self,
        run: PageRun,
        *,
        lease_ms: int = 0,
        pin: bool = True,
        direct: bool = False,
        context: common_pb2.RequestContext | None = None,
    ) -> Lookup:
        """Look up the longest stored prefix of the run, and keep it by a lease of `lease_ms` (0: the store's default)
        unless `pin` is False. With `direct`, a result with a lease also has the access that `attach` returns. Raises
        QuireError if the call fails (see `from_rpc_error`)."""
        request = _lookup_request(run, lease_ms, pin, context)
        request.direct = direct
        return _lookup(self._call(self._stub.LookupAndPin, request, context))

    def attach(
        self, lease: bytes, context: common_pb2.RequestContext | None = None, timeout_s: float | None = None
    ) -> LeaseAccess:
        """Return the other ways, beside gRPC, to the pages of a lookup. `timeout_s` None: the client's time limit.
        Raises NotFound if the lease has ended, another QuireError if the call fails."""
        request = kvstore_pb2.AttachRequest(context=context, lease=lease)
        return _access(lease, self._call(self._stub.Attach, request, context, timeout_s))

    def data_endpoints(self) -> LeaseAccess:
        """Return the kvstore's arena and data port, without a lease. Waits up to `_START_S` for a kvstore that does not
        listen yet: a synchronous gRPC channel reconnects only while a call waits. Raises QuireError if the call
        fails."""
        stats = self._call(partial(self._stub.Stats, wait_for_ready=True), kvstore_pb2.StatsRequest(), None, _START_S)
        return LeaseAccess(b"", arena=stats.arena, data_port=stats.data_port)

    def get_pages(
        self,
        lease: bytes,
        indices: Sequence[int] | None = None,
        *,
        timeout_s: float | None = None,
        context: common_pb2.RequestContext | None = None,
    ) -> Generator[tuple[int, bytes], None, None]:
        """Yield the index and the framed bytes of each page in `indices`, as they arrive; None: of all pages of the
        lease, an empty list: of none. `timeout_s` limits the whole call; None: the client's time limit. The bytes are
        not checked. The call begins with the first page that the reader asks for, and a reader that stops early ends
        it. A page whose last part does not come is left out. Raises QuireError if the call fails (see
        `from_rpc_error`)."""
        if indices is not None and not len(indices):
            return
        request = kvstore_pb2.GetRequest(context=context, lease=lease, pages=pack_i32(indices if indices else []))
        with continued(context):
            call = self._stub.Get(request, timeout=timeout_s or self._timeout_s)
        parts: list[bytes] = []
        try:
            for frame in call:
                parts.append(frame.data)
                if frame.last:
                    yield frame.page, parts[0] if len(parts) == 1 else b"".join(parts)
                    parts = []
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
        finally:
            call.cancel()  # a reader that stops early must not leave a thread of the store waiting

    def check(self, lease: bytes, index: int, context: common_pb2.RequestContext | None = None) -> bool:
        """Ask the store to check one page of a lookup. Returns whether the page is intact; if not, the store removes
        it. Raises NotFound if the lease has ended, Unsupported for a store that cannot check, and another QuireError if
        the call fails."""
        request = kvstore_pb2.CheckRequest(context=context, lease=lease, page=index)
        return bool(self._call(self._stub.Check, request, context).intact)

    def put_pages(
        self,
        run: PageRun,
        dtype: str,
        page_bytes: int,
        body: Callable[[int], PageBytes],
        *,
        on_wanted: Callable[[Sequence[int]], None] = lambda wanted: None,
        lease_ms: int = 0,
        timeout_s: float | None = None,
        context: common_pb2.RequestContext | None = None,
    ) -> PutOutcome:
        """Put those of the run's pages that the store wants, and return how many were wanted, stored and refused. If it
        wants any, `on_wanted` is called first, with their indices. `body(index)` returns the body of one page; it is
        called in order, on a gRPC thread. A body may be changed once `body` is called again. `timeout_s` bounds only
        the call that sends the pages (None: the client's time limit); each other call has the client's time limit, and
        `on_wanted` has none. If `body` raises TransferCancelled, so does this method, whichever page it was; it raises
        QuireError if a call fails, also by another exception of `body`. An exception of `on_wanted` passes through.
        After a failure, the put is released, so that the store need not wait for its lease to end; if this fails too,
        that is ignored."""
        begun = self.begin_put(run, page_bytes, lease_ms=lease_ms, context=context)
        if not begun.wanted:
            return PutOutcome(0, 0, 0)
        with self.committing(begun, context) as put:
            on_wanted(begun.wanted)
            self.send_pages(begun.access.lease, run, dtype, begun.wanted, body, timeout_s=timeout_s, context=context)
        return put[0]

    def begin_put(
        self, run: PageRun, page_bytes: int, *, lease_ms: int = 0, context: common_pb2.RequestContext | None = None
    ) -> StartedPut:
        """Ask which of the run's pages the store wants, and get a lease under which to send them. `page_bytes` is the
        size of a page's body. If the store wants any, `committing` must follow. Raises QuireError if the call fails
        (see `from_rpc_error`)."""
        keys = kvstore_pb2.PageKeys(namespace=run.namespace, group=run.group, hashes=run.hashes)
        request = kvstore_pb2.BeginPutRequest(context=context, keys=keys, page_bytes=page_bytes, lease_ms=lease_ms)
        begun = self._call(self._stub.BeginPut, request, context)
        admitted = begun.admitted if begun.HasField("admitted") else None
        return StartedPut(i32(begun.wanted, "wanted").tolist(), _access(begun.lease, begun), admitted)

    @contextlib.contextmanager
    def committing(
        self, begun: StartedPut, context: common_pb2.RequestContext | None = None
    ) -> Iterator[list[PutOutcome]]:
        """Context manager: the caller sends the put's pages inside it. On a normal exit, the pages are committed and
        the outcome is appended to the list that the context manager yields. If the body or the commit raises, the put
        is released; a release that fails is ignored."""
        outcome: list[PutOutcome] = []
        lease = begun.access.lease
        try:
            yield outcome
            done = self._call(self._stub.CommitPut, kvstore_pb2.CommitPutRequest(lease=lease), context)
        except BaseException:
            self._try_release(lease)
            raise
        outcome.append(PutOutcome(len(begun.wanted), done.stored, done.refused))

    def send_pages(
        self,
        lease: bytes,
        run: PageRun,
        dtype: str,
        indices: Sequence[int],
        body: Callable[[int], PageBytes],
        *,
        timeout_s: float | None = None,
        context: common_pb2.RequestContext | None = None,
        mac: PageMac | None = None,
    ) -> None:
        """Send pages of a put over gRPC, with MACs by `mac` if it is given; for `body` see `put_pages`. The put is
        neither committed nor released. `timeout_s` bounds the call; None: the client's time limit. Raises the
        TransferCancelled that `body` raised, else QuireError if the call fails."""
        abandoned = list[TransferCancelled]()
        frames = _frames(lease, run, dtype, indices, body, abandoned, mac)
        try:
            self._call(self._stub.Put, frames, context, timeout_s)
        except QuireError:
            if not abandoned:  # else the stream ended early, maybe before its first frame, which the store refuses
                raise
        if abandoned:
            raise abandoned[0]

    def renew(self, lease: bytes, lease_ms: int = 0) -> int:
        """Prolong a lease; returns its life in ms. Raises NotFound if it has ended."""
        request = kvstore_pb2.RenewRequest(lease=lease, lease_ms=lease_ms)
        return int(self._call(self._stub.Renew, request, None).lease_ms)

    def release(self, *leases: bytes) -> int:
        """End leases; unknown ones do no harm. Returns how many ended."""
        request = kvstore_pb2.ReleaseRequest(leases=[lease for lease in leases if lease])
        return int(self._call(self._stub.Release, request, None).released)

    def _try_release(self, lease: bytes) -> None:
        """Release a lease; failures are ignored, since the lease then ends by itself."""
        try:
            self._stub.Release(kvstore_pb2.ReleaseRequest(leases=[lease]), timeout=self._timeout_s)
        except grpc.RpcError:
            return  # the store is away: the lease ends by itself

    def _call(
        self,
        method: Callable[..., T],
        request: object,
        context: common_pb2.RequestContext | None,
        timeout_s: float | None = None,
    ) -> T:
        """Call the method within the request's trace, with `timeout_s` or else the client's time limit, and return its
        response. Raises a QuireError in place of gRPC's error if the call fails (see `from_rpc_error`)."""
        try:
            with continued(context):
                return method(request, timeout=timeout_s or self._timeout_s)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error


class AioKvClient:
    """Control calls for asyncio. There are no data calls: only workers transfer pages."""

    def __init__(self, channel: grpc.aio.Channel, timeout_s: float = 5.0) -> None:
        self._stub = kvstore_pb2_grpc.KvStoreStub(channel)
        self._timeout_s = timeout_s

    async def lookup(
        self,
        run: PageRun,
        *,
        lease_ms: int = 0,
        pin: bool = True,
        context: common_pb2.RequestContext | None = None,
    ) -> Lookup:
        """Look up the longest stored prefix of the run, and keep it by a lease of `lease_ms` (0: the store's default)
        unless `pin` is False. Raises QuireError if the call fails (see `from_rpc_error`)."""
        try:
            with continued(context):
                request = _lookup_request(run, lease_ms, pin, context)
                return _lookup(await self._stub.LookupAndPin(request, timeout=self._timeout_s))
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error

    async def renew(self, lease: bytes, lease_ms: int = 0) -> int:
        """Prolong a lease; returns its life in ms. Raises NotFound if it has ended, another QuireError if the call
        fails."""
        try:
            request = kvstore_pb2.RenewRequest(lease=lease, lease_ms=lease_ms)
            return int((await self._stub.Renew(request, timeout=self._timeout_s)).lease_ms)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error

    async def release(self, *leases: bytes) -> int:
        """End leases; unknown ones do no harm. Returns how many ended. Raises QuireError if the call fails."""
        try:
            request = kvstore_pb2.ReleaseRequest(leases=[lease for lease in leases if lease])
            return int((await self._stub.Release(request, timeout=self._timeout_s)).released)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error


def _lookup_request(
    run: PageRun, lease_ms: int, pin: bool, context: common_pb2.RequestContext | None
) -> kvstore_pb2.LookupAndPinRequest:
    keys = kvstore_pb2.PageKeys(namespace=run.namespace, group=run.group, hashes=run.hashes)
    return kvstore_pb2.LookupAndPinRequest(context=context, keys=keys, lease_ms=lease_ms, no_pin=not pin)


def _access(
    lease: bytes,
    response: kvstore_pb2.LookupAndPinResponse | kvstore_pb2.AttachResponse | kvstore_pb2.BeginPutResponse,
) -> LeaseAccess:
    """Take the lease's access from a response; that to `begin_put` brings no offsets and generations."""
    generations = () if isinstance(response, kvstore_pb2.BeginPutResponse) else tuple(response.generations)
    return LeaseAccess(
        lease, response.lease_key, response.arena, response.data_port, tuple(response.offsets), generations
    )


def _lookup(response: kvstore_pb2.LookupAndPinResponse) -> Lookup:
    """Decode the answer to a lookup. Only the answer to a direct lookup has `access`."""
    return Lookup(
        response.pages,
        response.lease,
        response.lease_ms,
        response.medium,
        response.epoch.boot_id,
        response.elapsed_us,
        _access(response.lease, response) if response.lease_key else None,
    )


def _frames(
    lease: bytes,
    run: PageRun,
    dtype: str,
    wanted: Sequence[int],
    body: Callable[[int], PageBytes],
    abandoned: list[TransferCancelled],
    mac: PageMac | None,
) -> Iterator[kvstore_pb2.PutFrame]:
    """Yield frames of the wanted pages: each page's header with the start of its body, then the rest, 1 MiB at a time.
    A TransferCancelled ends them and is noted in `abandoned`: if raised here, gRPC would log it as a failure."""
    for index in wanted:
        try:
            view = memoryview(body(index)).cast("B")  # type: ignore[arg-type]  # numpy's stubs know of buffers from 3.12 on
        except TransferCancelled as error:
            abandoned.append(error)
            return
        header = frame_page(run.key(index), dtype, view, mac)
        first = FRAME_BYTES - HEADER_BYTES
        yield kvstore_pb2.PutFrame(lease=lease, page=index, offset=0, data=header + view[:first])
        for start in range(first, len(view), FRAME_BYTES):
            data = bytes(view[start : start + FRAME_BYTES])
            yield kvstore_pb2.PutFrame(page=index, offset=HEADER_BYTES + start, data=data)
