"""Transport from another GPU of the host: the engine's device reads pages directly in the peer's memory. The connection
only carries the places of the pages, and the proof that the lease held until after they were read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire_common.columns import i32
from quire_common.kv_data.frame import DataConnectionError, FrameKind

if TYPE_CHECKING:
    from quire_worker.arrays import Int32
    from quire_worker.kv_transfer.peers.peer_access import PeerAccess
    from quire_worker.kv_transfer.peers.pull_end import PoolPageSink, PullEnd
    from quire_worker.kv_transfer.transports.data_link import DataLink, Exchange
    from quire_worker.kv_transfer.transports.transport import PageSink, PageTransfer


class PeerCuda:
    """Implements FetchTransport. The link is the pull's. Pages land in the pool, not in the ring's slots."""

    name = "cuda_ipc"

    def __init__(self, link: DataLink, pool: PoolPageSink) -> None:
        self._link = link
        self._pool_sink = pool

    @classmethod
    def make(cls, end: PullEnd) -> PeerCuda:
        return cls(end.link, end.pool_sink)

    def offered(self, access: PeerAccess) -> bool:
        return access.memory and bool(access.socket or access.tcp)

    def fetch(self, transfer: PageTransfer[PeerAccess], sink: PageSink) -> None:
        """Have the engine's device read all remaining pages from the peer's memory, then tell the peer that no more are
        wanted. Pages count only once a later answer shows that their lease still stood; if the fetch breaks, the others
        are dropped, and the engine is told so. `sink` is not used. Raises TransportError, NotFound if the peer refuses,
        InvalidArgument for a malformed list of places, and TransferCancelled."""
        access = transfer.access
        address = access.socket or access.tcp
        if not address:
            raise ValueError("this way was not offered")
        try:
            with self._link.exchange(address, access.key) as exchange:
                while self._pool_sink.reached < len(transfer.run):
                    self._pool_sink.fetch(self._located(exchange, transfer))
                exchange.send(FrameKind.DONE)
                exchange.receive_frame(FrameKind.END)
                self._pool_sink.keep_last()
        finally:
            self._pool_sink.drop()

    def close(self) -> None:
        self._link.close()

    def _located(self, exchange: Exchange, transfer: PageTransfer[PeerAccess]) -> Int32:
        """Ask the peer where the next pages lie in its memory, and wait until at least one is filled. Returns the
        places of the filled pages, in order. Each answer shows that the lease stood until now, so the pages fetched
        before are kept. Raises DataConnectionError for an answer about other pages or without places. A malformed list
        of places raises InvalidArgument, which ends the pull."""
        first = transfer.access.first_index + self._pool_sink.reached
        exchange.send(FrameKind.LOCATE, page=first)
        while True:
            exchange.set_time_budget(transfer.page_bytes)
            frame = exchange.receive_frame(FrameKind.PLACED, FrameKind.ALIVE)
            self._pool_sink.keep()
            if frame.head.kind is FrameKind.PLACED:
                break
        payload = bytearray(frame.head.length)
        if payload:
            exchange.receive_payload(frame, memoryview(payload))
        places = i32(bytes(payload), "places")
        if frame.head.page != first or not len(places):
            raise DataConnectionError(
                "garbage", f"{len(places)} places from {frame.head.page} on are not what comes next"
            )
        return places[: len(transfer.run) - self._pool_sink.reached]
