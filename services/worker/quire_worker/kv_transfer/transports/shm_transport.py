"""Transport within the same host: this process copies pages out of the store's arena, and the store copies pages out of
the ring. The socket only carries the authorisation and the places of the pages.

A copied page counts if its place still has the generation that the lease was told, and if header and checksum are
right. So if the store reuses the place meanwhile, for example after the lease has expired, the page is a miss.
"""

from __future__ import annotations

import contextlib
import re
import select
import struct
import threading
from typing import TYPE_CHECKING

from quire_common.errors import NotFound
from quire_common.kv_data.frame import DataConnectionError, FrameKind
from quire_common.pages import HEADER_BYTES, PageCorrupt, check_parts
from quire_worker.kv_transfer.transports.data_link import DataLink, connect
from quire_worker.kv_transfer.transports.page_frames import send_pages
from quire_worker.kv_transfer.transports.shared_map import SharedMap
from quire_worker.kv_transfer.transports.transport import TransportError

if TYPE_CHECKING:
    import socket

    from quire_common.kv.kv_client import LeaseAccess
    from quire_worker.kv_transfer.transports.data_link import Exchange
    from quire_worker.kv_transfer.transports.transport import PageSink, PageSource, PageTransfer, StoreEnd


_HEAD_BYTES = 64
_GENERATION = struct.Struct("<Q")


class ArenaMap:
    """The store's arena, mapped from `fd`, which this object takes over. `sock` is the connection over which the
    descriptor came; a thread closes the map when this connection ends. Raises DataConnectionError if `fd` cannot be
    mapped safely (see SharedMap)."""

    def __init__(self, fd: int, sock: socket.socket) -> None:
        self._map = SharedMap(fd)
        self._sock = sock
        threading.Thread(target=self._watch, name="arena-watch", daemon=True).start()

    @property
    def closed(self) -> bool:
        """Whether the arena is mapped no more."""
        return self._map.closed

    def came_over(self, sock: socket.socket) -> bool:
        """Whether the arena came over this connection."""
        return self._sock is sock

    def copy(self, offset: int, generation: int, body: memoryview) -> tuple[bytes, int]:
        """Copy the page at `offset` of the arena into `body`; returns its header, and the copy's checksum under that
        header. Raises PageReplaced if the place now has another generation, PageCorrupt for a bad offset, and
        DataConnectionError if the store has gone."""
        if offset < _HEAD_BYTES:
            raise PageCorrupt(f"there is no page at {offset}")
        header = self._map.read(offset, HEADER_BYTES)
        checksum = self._map.copy(offset + HEADER_BYTES, header, body)
        (found,) = _GENERATION.unpack(self._map.read(offset - _HEAD_BYTES, _GENERATION.size))
        if found != generation:
            raise PageReplaced
        return header, checksum

    def close(self) -> None:
        """Close the map. Idempotent."""
        self._map.close()

    def _watch(self) -> None:
        """Wait, on a thread, until the connection ends, then close the map. Reads nothing from the connection."""
        poll = select.poll()
        with contextlib.suppress(OSError, ValueError):  # it has been closed already
            poll.register(self._sock, select.POLLRDHUP)
            poll.poll()
        self.close()


class PageReplaced(PageCorrupt):
    """Another page lies there now: the lease has ended. The store knows."""

    def __init__(self) -> None:
        super().__init__("the page has gone from its place")


# The name comes from the wire: it leads to no socket but a kvstore's.
_NAME = re.compile(r"quire-kvstore-[0-9a-f]{32}")


class ShmTransport:
    """Implements Transport. There is one link for each direction; the mapping of the arena ends with its link."""

    name = "shm"
    needs_attach = True

    def __init__(self) -> None:
        self._fetching, self._sending = DataLink(), DataLink()
        self._arena: ArenaMap | None = None
        self._lent_to: object = None

    @classmethod
    def make(cls, end: StoreEnd) -> ShmTransport:
        return cls()

    def offered(self, access: LeaseAccess) -> bool:
        return bool(_NAME.fullmatch(access.arena))

    def probe(self, access: LeaseAccess) -> None:
        """Connect to the arena's socket, greet, and close the connection at once. Raises TransportError if nobody there
        answers."""
        try:
            connect(access.arena).close()
        except (DataConnectionError, OSError) as error:
            raise TransportError(str(error)) from error

    def fetch(self, transfer: PageTransfer[LeaseAccess], sink: PageSink) -> None:
        """Copy the remaining pages for which the lease has places out of the store's arena, and check each. The store
        is asked for nothing if its arena is mapped already. A damaged page is reported to the store, then PageCorrupt
        is raised (TransportError if the report fails). Raises NotFound if the store refuses the map or the report,
        TransportError if the connection fails, and PageReplaced for a page whose lease has ended, without a report."""
        access = transfer.access
        with self._fetching.exchange(access.arena, access.key) as exchange:
            arena = self._mapped(exchange)
            try:
                while (index := sink.received_pages) < min(len(transfer.run), len(access.offsets)):
                    room = sink.next_buffer()
                    header, checksum = arena.copy(access.offsets[index], access.generations[index], room)
                    check_parts(header, room, transfer.run.key(index), transfer.dtype, transfer.page_bytes, checksum)
                    sink.commit_page()
            except PageReplaced:
                raise
            except PageCorrupt:
                exchange.send(FrameKind.DAMAGED, page=sink.received_pages)
                exchange.receive_frame(FrameKind.END)
                raise

    def send(self, transfer: PageTransfer[LeaseAccess], page_source: PageSource) -> None:
        """Lend the store the ring, once for each connection, and name the place of each remaining page; the store
        copies the pages out of the ring. Returns when the store has taken them all. Raises TransportError, NotFound if
        the store refuses, and TransferCancelled."""
        size = len(page_source.remaining) * transfer.page_bytes
        try:
            with self._sending.exchange(transfer.access.arena, transfer.access.key, size) as exchange:
                self._lend(exchange, page_source.fd)

                def put(index: int, header: bytes, body: memoryview) -> None:
                    exchange.send(FrameKind.TAKE, page=index, offset=page_source.page_offset(index), page_header=header)

                send_pages(exchange, transfer, page_source, put)
        except NotFound:
            self._sending.close()  # with the answers that were still to come
            raise

    def close(self) -> None:
        """Close both links and the map of the arena."""
        self._fetching.close()
        self._sending.close()
        if self._arena is not None:
            self._arena.close()

    def _mapped(self, exchange: Exchange) -> ArenaMap:
        """Return the store's arena, which is asked for and mapped once for each connection. Raises DataConnectionError
        if the store sends no descriptor, or one that cannot be mapped."""
        if self._arena is None or self._arena.closed or not self._arena.came_over(exchange.connection.sock):
            if self._arena is not None:
                self._arena.close()
            exchange.send(FrameKind.MAP)
            frame = exchange.receive_frame(FrameKind.END)
            if not frame.fds:
                raise DataConnectionError("garbage", "no descriptor came")
            self._arena = ArenaMap(frame.fds.pop(), exchange.connection.sock)
        return self._arena

    def _lend(self, exchange: Exchange, fd: int) -> None:
        """Send the store the ring's descriptor and wait for its answer. Does nothing if the ring has already been lent
        over this connection."""
        if self._lent_to is not exchange.connection:
            exchange.send(FrameKind.LEND, fds=[fd])
            exchange.receive_frame(FrameKind.END)
            self._lent_to = exchange.connection
