"""The gRPC transport: Put and Get streams on the channel of the control calls. Every lease allows it. A stream has
the time budget of a data connection (`time_budget_s`), and the kvstore's own limit. Unlike there, time in which the
stream waits for the engine counts."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from quire_common.errors import QuireError
from quire_common.pages import PageCorrupt, check_page
from quire_common.sequence import context_to_pb
from quire_worker.kv_transfer.transports.data_link import time_budget_s

if TYPE_CHECKING:
    from quire_common.kv.kv_client import KvClient, LeaseAccess
    from quire_worker.kv_transfer.transports.transport import PageSink, PageSource, PageTransfer, StoreEnd


class GrpcTransport:
    """Implements Transport."""

    name = "grpc"
    needs_attach = False

    def __init__(self, client: KvClient) -> None:
        self._client = client

    @classmethod
    def make(cls, end: StoreEnd) -> GrpcTransport:
        return cls(end.client)

    def offered(self, access: LeaseAccess) -> bool:
        return True

    def probe(self, access: LeaseAccess) -> None:
        """Does nothing: the access itself came over gRPC."""

    def fetch(self, transfer: PageTransfer[LeaseAccess], sink: PageSink) -> None:
        """Receive the remaining pages in one stream, all of them unless the store ends the stream early, which is no
        error. If a page is damaged or out of order, ask the store to check its own copy, ignoring errors of this call,
        then raise PageCorrupt. Raises QuireError, not TransportError, if the call fails: there is no transport after
        this one."""
        try:
            self._receive(transfer, sink)
        except PageCorrupt:
            with contextlib.suppress(QuireError):  # a kvstore of before, or away: the page is a miss all the same
                self._client.check(transfer.access.lease, sink.received_pages, context_to_pb(transfer.context))
            raise

    def send(self, transfer: PageTransfer[LeaseAccess], page_source: PageSource) -> None:
        """Send all remaining pages in one stream. Each page is released when the stream asks for the next one, the last
        at the end. Does nothing if no page remains. Raises QuireError if the call fails, and TransferCancelled; pages
        not released are then left to the caller."""
        sent: list[int] = []

        def body(index: int) -> memoryview:
            """Return a page's body for the stream, and release the page before it."""
            while sent:
                page_source.release_page(sent.pop())
            sent.append(index)
            return page_source.page_body(index)

        indices = list(page_source.remaining)
        if indices:
            self._client.send_pages(
                transfer.access.lease,
                transfer.run,
                transfer.dtype,
                indices,
                body,
                timeout_s=time_budget_s(len(indices) * transfer.page_bytes),
                context=context_to_pb(transfer.context),
                mac=transfer.mac,
            )
            page_source.release_page(sent.pop())

    def close(self) -> None:
        """The channel is another's."""

    def _receive(self, transfer: PageTransfer[LeaseAccess], sink: PageSink) -> None:
        """Stream the remaining pages from the store into the sink, and check each. Raises PageCorrupt for one that is
        damaged or out of order."""
        indices = range(sink.received_pages, len(transfer.run))
        pages = self._client.get_pages(
            transfer.access.lease,
            indices,
            timeout_s=time_budget_s(len(indices) * transfer.page_bytes),
            context=context_to_pb(transfer.context),
        )
        with contextlib.closing(pages):
            for index, framed in pages:
                if index != sink.received_pages:
                    raise PageCorrupt(f"page {index} came in the place of {sink.received_pages}")
                body = check_page(framed, transfer.run.key(index), transfer.dtype, transfer.page_bytes, transfer.mac)
                sink.next_buffer()[:] = body
                sink.commit_page()
