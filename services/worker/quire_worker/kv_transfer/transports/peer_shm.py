"""Transport from another worker of the same host: pages are copied out of the ring, where its engine has put them. The
socket only carries the authorisation and the places of the pages.

The peer may reuse a page's slot once it was told that the page is taken, or when its time limit has passed. So a page
that does not match its header is no proof of damage: another transport is tried.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

from quire_common.kv_data.frame import DataConnectionError, FrameKind
from quire_worker.kv_transfer.transports.shared_pages import fetch_shared_pages

if TYPE_CHECKING:
    from quire_worker.kv_transfer.peers.peer_access import PeerAccess
    from quire_worker.kv_transfer.peers.pull_end import PullEnd
    from quire_worker.kv_transfer.transports.data_link import DataLink, Exchange
    from quire_worker.kv_transfer.transports.shared_map import SharedMapCache
    from quire_worker.kv_transfer.transports.transport import PageSink, PageTransfer


class PeerShm:
    """Implements FetchTransport. The link is the pull's."""

    name = "shm"

    def __init__(self, link: DataLink, maps: SharedMapCache) -> None:
        self._link = link
        self._maps = maps

    @classmethod
    def make(cls, end: PullEnd) -> PeerShm:
        return cls(end.link, end.maps)

    def offered(self, access: PeerAccess) -> bool:
        return bool(access.socket)

    def fetch(self, transfer: PageTransfer[PeerAccess], sink: PageSink) -> None:
        """Copy all remaining pages out of the peer's ring, and confirm them by frames, or sooner if copying is slow.
        Then DONE ends the export. Raises TransportError, also for a page that does not match, and NotFound if the peer
        refuses."""
        access = transfer.access
        with self._link.exchange(access.socket, access.key) as exchange:
            if sink.received_pages < len(transfer.run):
                self._fetch(exchange, transfer, sink)
            exchange.send(FrameKind.DONE)
            exchange.receive_frame(FrameKind.END)

    def close(self) -> None:
        self._link.close()

    def _fetch(self, exchange: Exchange, transfer: PageTransfer[PeerAccess], sink: PageSink) -> None:
        """Ask for a descriptor of the peer's ring, map it, and copy the remaining pages out of it, one at a time, as
        the peer shows them. Raises DataConnectionError if no descriptor comes or it cannot be mapped."""
        exchange.send(FrameKind.MAP)
        frame = exchange.receive_frame(FrameKind.END)
        if not frame.fds:
            raise DataConnectionError("garbage", "no descriptor came")
        with self._maps.using(frame.fds.pop()) as ring:
            fetch_shared_pages(
                self._link, exchange, FrameKind.GET, transfer, sink, lambda _: nullcontext(ring.copy), most=1
            )
