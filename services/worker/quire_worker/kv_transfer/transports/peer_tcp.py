"""Transport from another worker's peer port: pages over TCP, straight into the ring, each as soon as the peer has
filled it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire_common.columns import pack_i32
from quire_common.kv_data.frame import FrameKind
from quire_worker.kv_transfer.transports.page_frames import receive_parts

if TYPE_CHECKING:
    from quire_common.kv_data.connection import ReceivedFrame
    from quire_worker.kv_transfer.peers.peer_access import PeerAccess
    from quire_worker.kv_transfer.peers.pull_end import PullEnd
    from quire_worker.kv_transfer.transports.data_link import Address, DataLink, Exchange
    from quire_worker.kv_transfer.transports.transport import PageSink, PageTransfer

# The engine is not woken for single pages where the next begins to come so soon.
SOON_S = 1e-3


class PeerTcp:
    """Implements FetchTransport. The link is the pull's."""

    name = "tcp"

    def __init__(self, link: DataLink) -> None:
        self._link = link

    @classmethod
    def make(cls, end: PullEnd) -> PeerTcp:
        return cls(end.link)

    def offered(self, access: PeerAccess) -> bool:
        return access.tcp is not None

    def fetch(self, transfer: PageTransfer[PeerAccess], sink: PageSink) -> None:
        """Receive all remaining pages in frames over TCP, then tell the peer that no more are wanted."""
        if transfer.access.tcp is None:
            raise ValueError("this way was not offered")
        fetch_all(self._link, transfer.access.tcp, transfer, sink)

    def close(self) -> None:
        self._link.close()


def fetch_all(link: DataLink, address: Address, transfer: PageTransfer[PeerAccess], sink: PageSink) -> None:
    """Receive all remaining pages in frames over the link, in one request. Then tell the peer that no more are wanted,
    and wait for its answer. Raises TransportError if the connection breaks, NotFound if the peer refuses, and
    PageCorrupt for a wrong page; after the last two the link stays open."""
    with link.exchange(address, transfer.access.key) as exchange:
        if sink.received_pages < len(transfer.run):
            first = transfer.access.first_index
            exchange.send(FrameKind.GET, pack_i32(range(first + sink.received_pages, first + len(transfer.run))))
            while sink.received_pages < len(transfer.run):
                _receive_page(exchange, transfer, sink)
            exchange.receive_frame(FrameKind.END)
        exchange.send(FrameKind.DONE)
        exchange.receive_frame(FrameKind.END)


def _receive_page(exchange: Exchange, transfer: PageTransfer[PeerAccess], sink: PageSink) -> None:
    """Receive the next page into the sink. If the page does not begin to come within SOON_S, first flush the sink,
    which announces the pages before it."""
    if not exchange.connection.wait(SOON_S):
        sink.flush()
    frame = next_but_alive(exchange, transfer.page_bytes)
    receive_parts(exchange, frame, transfer.access.first_index + sink.received_pages, transfer, sink)


def next_but_alive(exchange: Exchange, page_bytes: int, kind: FrameKind = FrameKind.PAGE) -> ReceivedFrame:
    """Wait for the next frame of this kind, as long as the peer gives signs of life (ALIVE), which are skipped. For the
    first frame, and again after each sign of life, the time budget is that of `page_bytes`. Raises as
    `Exchange.receive_frame` does."""
    while True:
        exchange.set_time_budget(page_bytes)
        frame = exchange.receive_frame(kind, FrameKind.ALIVE)
        if frame.head.kind is kind:
            return frame
