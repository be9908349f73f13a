"""The same host: pages are copied out of the store's arena, and by the store out of the ring. All that a socket carries
is who may do so, and which page lies where.

A page that was copied counts if its place still has the generation that the lease was told, and if header and checksum
are right: whatever the store, or a lease that has run out, does meanwhile ends as a miss.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from quire_common.errors import NotFound
from quire_common.kv_data.frame import DataConnectionError, Kind
from quire_common.pages import PageCorrupt, check_parts
from quire_worker.mover.transports.arena_map import ArenaMap, PageGone
from quire_worker.mover.transports.data_link import DataLink, connect
from quire_worker.mover.transports.outbound import send_pages
from quire_worker.mover.transports.transport import TransportDown

if TYPE_CHECKING:
    from quire_common.kv_client import LeaseAccess
    from quire_worker.mover.transports.data_link import Exchange
    from quire_worker.mover.transports.transport import Cargo, Landing, Shipment

# The name comes from the wire: it leads to no socket but a kvstore's.
_NAME = re.compile(r"quire-kvstore-[0-9a-f]{32}")


class ShmTransport:
    """See Transport. A link for each direction; the arena goes with its link."""

    name = "shm"

    def __init__(self) -> None:
        self._fetching, self._sending = DataLink(), DataLink()
        self._arena: ArenaMap | None = None
        self._lent_to: object = None

    def offered(self, access: LeaseAccess) -> bool:
        """See Transport."""
        return bool(_NAME.fullmatch(access.arena))

    def probe(self, access: LeaseAccess) -> None:
        """See Transport."""
        try:
            connect(access.arena).close()
        except (DataConnectionError, OSError) as error:
            raise TransportDown(str(error)) from error

    def fetch(self, cargo: Cargo[LeaseAccess], landing: Landing) -> None:
        """See Transport."""
        access = cargo.access
        with self._fetching.exchange(access.arena, access.key) as exchange:
            arena = self._mapped(exchange)
            try:
                while (index := landing.landed) < min(len(cargo.run), len(access.offsets)):
                    room = landing.room()
                    header, checksum = arena.copy(access.offsets[index], access.generations[index], room)
                    check_parts(header, room, cargo.run.key(index), cargo.dtype, cargo.page_bytes, checksum)
                    landing.land()
            except PageGone:
                raise
            except PageCorrupt:
                exchange.send(Kind.DAMAGED, page=landing.landed)
                exchange.arrived(Kind.END)
                raise

    def send(self, cargo: Cargo[LeaseAccess], shipment: Shipment) -> None:
        """See Transport."""
        size = len(shipment.left) * cargo.page_bytes
        try:
            with self._sending.exchange(cargo.access.arena, cargo.access.key, size) as exchange:
                self._lend(exchange, shipment.fd)

                def put(index: int, header: bytes, body: memoryview) -> None:
                    exchange.send(Kind.TAKE, page=index, offset=shipment.place(index), page_header=header)

                send_pages(exchange, cargo, shipment, put)
        except NotFound:
            self._sending.close()  # with the answers that were still to come
            raise

    def close(self) -> None:
        """See Transport."""
        self._fetching.close()
        self._sending.close()
        if self._arena is not None:
            self._arena.close()

    def _mapped(self, exchange: Exchange) -> ArenaMap:
        """The arena, which is mapped once for each connection."""
        if self._arena is None or self._arena.closed or not self._arena.came_over(exchange.connection.sock):
            if self._arena is not None:
                self._arena.close()
            exchange.send(Kind.MAP)
            frame = exchange.arrived(Kind.END)
            if not frame.fds:
                raise DataConnectionError("garbage", "no descriptor came")
            self._arena = ArenaMap(frame.fds.pop(), exchange.connection.sock)
        return self._arena

    def _lend(self, exchange: Exchange, fd: int) -> None:
        """The ring, once for each connection."""
        if self._lent_to is not exchange.connection:
            exchange.send(Kind.LEND, fds=[fd])
            exchange.arrived(Kind.END)
            self._lent_to = exchange.connection
