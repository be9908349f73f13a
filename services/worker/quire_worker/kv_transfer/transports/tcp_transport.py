"""The data port: pages over TCP, straight from the ring and into it, on the host of the kvstore's own address."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire_common.columns import pack_i32
from quire_common.config import split_address
from quire_common.errors import ConfigError, NotFound
from quire_common.kv_data.frame import BODY_BYTES, DataConnectionError, FrameKind
from quire_common.pages import PageCorrupt
from quire_worker.kv_transfer.transports.data_link import DataLink, connect
from quire_worker.kv_transfer.transports.page_frames import receive_parts, send_pages
from quire_worker.kv_transfer.transports.transport import TransportError

if TYPE_CHECKING:
    from quire_common.kv.kv_client import LeaseAccess
    from quire_worker.kv_transfer.transports.transport import PageSink, PageSource, PageTransfer, StoreEnd


class TcpTransport:
    """Implements Transport. There is one link for each direction."""

    name = "tcp"
    needs_attach = True

    def __init__(self, kvstore: str) -> None:
        self._host = _host(kvstore)
        self._fetching, self._sending = DataLink(), DataLink()

    @classmethod
    def make(cls, end: StoreEnd) -> TcpTransport:
        return cls(end.kvstore)

    def offered(self, access: LeaseAccess) -> bool:
        return bool(access.data_port and self._host)

    def probe(self, access: LeaseAccess) -> None:
        """Connect to the store's data port, greet, and close the connection at once. Raises TransportError if nobody
        there answers."""
        try:
            connect((self._host, access.data_port)).close()
        except (DataConnectionError, OSError) as error:
            raise TransportError(str(error)) from error

    def fetch(self, transfer: PageTransfer[LeaseAccess], sink: PageSink) -> None:
        """Receive all remaining pages in frames. After a damaged page, the connection is closed, the page is reported
        to the store on a new one, and PageCorrupt is raised (TransportError if the report fails). Raises NotFound if
        the store refuses, and TransportError if the connection fails."""
        address = (self._host, transfer.access.data_port)
        size = (len(transfer.run) - sink.received_pages) * transfer.page_bytes
        try:
            with self._fetching.exchange(address, transfer.access.key, size) as exchange:
                exchange.send(FrameKind.GET, pack_i32(range(sink.received_pages, len(transfer.run))))
                while sink.received_pages < len(transfer.run):
                    receive_parts(exchange, exchange.receive_frame(FrameKind.PAGE), sink.received_pages, transfer, sink)
                exchange.receive_frame(FrameKind.END)
        except PageCorrupt:
            self._fetching.close()  # with all that was still to come
            with self._fetching.exchange(address, transfer.access.key) as exchange:
                exchange.send(FrameKind.DAMAGED, page=sink.received_pages)
                exchange.receive_frame(FrameKind.END)
            raise

    def send(self, transfer: PageTransfer[LeaseAccess], page_source: PageSource) -> None:
        """Send all remaining pages in frames; returns when the store has taken them all. Raises TransportError,
        NotFound if the store refuses, and TransferCancelled."""
        address = (self._host, transfer.access.data_port)
        size = len(page_source.remaining) * transfer.page_bytes
        try:
            with self._sending.exchange(address, transfer.access.key, size) as exchange:

                def put(index: int, header: bytes, body: memoryview) -> None:
                    """Send one page in parts of at most BODY_BYTES."""
                    for start in range(0, len(body), BODY_BYTES):
                        part = body[start : start + BODY_BYTES]
                        last = start + len(part) == len(body)
                        exchange.send(FrameKind.PUT, part, page=index, offset=start, last=last, page_header=header)

                send_pages(exchange, transfer, page_source, put, transfer.mac)
        except NotFound:
            self._sending.close()  # with the answers that were still to come
            raise

    def close(self) -> None:
        self._fetching.close()
        self._sending.close()


def _host(kvstore: str) -> str:
    """Return the host in the kvstore's configured or discovered address, which the wire never names. Empty if the
    address has none."""
    try:
        return split_address(kvstore.removeprefix("dns:///"), "kvstore")[0]
    except ConfigError:
        return ""
