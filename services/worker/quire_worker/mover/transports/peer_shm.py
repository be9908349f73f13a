"""Another worker of the same host: pages are copied out of the ring in which its engine has put them. All that a socket
carries is who may do so, and which page lies where.

The slot of a page is the peer's again once it was told that the page is taken, or when it has lost patience. So a page
that is not what its header says is no proof of damage: another way is tried.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire_common.columns import pack_i32
from quire_common.kv_data.frame import DataBroken, Kind
from quire_common.pages import PageCorrupt, check_parts
from quire_worker.mover.transports.peer_tcp import SOON_S, next_but_alive
from quire_worker.mover.transports.transport import TransportDown

if TYPE_CHECKING:
    from quire_worker.mover.peers.peer_access import PeerAccess
    from quire_worker.mover.transports.data_link import DataLink, Exchange
    from quire_worker.mover.transports.shared_map import SharedMap
    from quire_worker.mover.transports.shared_maps import SharedMaps
    from quire_worker.mover.transports.transport import Cargo, Landing


class PeerShm:
    """See Source. The link is the pull's."""

    name = "shm"

    def __init__(self, link: DataLink, maps: SharedMaps) -> None:
        self._link = link
        self._maps = maps

    def offered(self, access: PeerAccess) -> bool:
        """See Source."""
        return bool(access.socket)

    def fetch(self, cargo: Cargo[PeerAccess], landing: Landing) -> None:
        """See Source. In the end the peer is told that nothing more is wanted."""
        access = cargo.access
        with self._link.exchange(access.socket, access.key) as exchange:
            if landing.landed < len(cargo.run):
                self._fetch(exchange, cargo, landing)
            exchange.send(Kind.DONE)
            exchange.arrived(Kind.END)

    def close(self) -> None:
        """See Source."""
        self._link.close()

    def _fetch(self, exchange: Exchange, cargo: Cargo[PeerAccess], landing: Landing) -> None:
        exchange.send(Kind.MAP)
        arrived = exchange.arrived(Kind.END)
        if not arrived.fds:
            raise DataBroken("garbage", "no descriptor came")
        first = cargo.access.first_index
        with self._maps.using(arrived.fds.pop()) as ring:
            try:
                exchange.send(Kind.GET, pack_i32(range(first + landing.landed, first + len(cargo.run))))
                while landing.landed < len(cargo.run):
                    self._take_page(exchange, ring, cargo, landing)
                exchange.arrived(Kind.END)
            except PageCorrupt as error:
                self._link.close()
                raise TransportDown(str(error)) from error

    def _take_page(self, exchange: Exchange, ring: SharedMap, cargo: Cargo[PeerAccess], landing: Landing) -> None:
        index = landing.landed
        if not exchange.connection.wait(SOON_S):
            landing.tell()
        head = next_but_alive(exchange, cargo.page_bytes, Kind.TAKE).head
        if head.page != cargo.access.first_index + index:
            raise DataBroken("garbage", f"page {head.page} is not what comes next")
        room = landing.room()
        checksum = ring.copy(head.offset, head.page_header, room)
        check_parts(head.page_header, room, cargo.run.key(index), cargo.dtype, cargo.page_bytes, checksum)
        exchange.send(Kind.TAKEN, page=head.page)
        landing.land()
