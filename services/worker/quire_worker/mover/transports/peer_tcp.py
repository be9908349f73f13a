"""Another worker's peer port: pages over TCP, straight into the ring, each as soon as it is filled there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire_common.columns import pack_i32
from quire_common.kv_data.frame import Kind
from quire_worker.mover.transports.page_parts import receive_parts

if TYPE_CHECKING:
    from quire_common.kv_data.connection import ReceivedFrame
    from quire_worker.mover.peers.peer_access import PeerAccess
    from quire_worker.mover.transports.data_link import Address, DataLink, Exchange
    from quire_worker.mover.transports.transport import Cargo, Landing

# The engine is not woken for single pages where the next begins to come so soon.
SOON_S = 1e-3


class PeerTcp:
    """See Source. The link is the pull's."""

    name = "tcp"

    def __init__(self, link: DataLink) -> None:
        self._link = link

    def offered(self, access: PeerAccess) -> bool:
        """See Source."""
        return access.tcp is not None

    def fetch(self, cargo: Cargo[PeerAccess], landing: Landing) -> None:
        """See Source. In the end the peer is told that nothing more is wanted."""
        if cargo.access.tcp is None:
            raise ValueError("this way was not offered")
        fetch_all(self._link, cargo.access.tcp, cargo, landing)

    def close(self) -> None:
        """See Source."""
        self._link.close()


def fetch_all(link: DataLink, address: Address, cargo: Cargo[PeerAccess], landing: Landing) -> None:
    """All pages from the next one on, in frames; in the end the peer is told that nothing more is wanted."""
    with link.exchange(address, cargo.access.key) as exchange:
        if landing.landed < len(cargo.run):
            first = cargo.access.first_index
            exchange.send(Kind.GET, pack_i32(range(first + landing.landed, first + len(cargo.run))))
            while landing.landed < len(cargo.run):
                _receive_page(exchange, cargo, landing)
            exchange.arrived(Kind.END)
        exchange.send(Kind.DONE)
        exchange.arrived(Kind.END)


def _receive_page(exchange: Exchange, cargo: Cargo[PeerAccess], landing: Landing) -> None:
    if not exchange.connection.wait(SOON_S):
        landing.tell()
    frame = next_but_alive(exchange, cargo.page_bytes)
    receive_parts(exchange, frame, cargo.access.first_index + landing.landed, cargo, landing)


def next_but_alive(exchange: Exchange, page_bytes: int, kind: Kind = Kind.PAGE) -> ReceivedFrame:
    """The next frame of the kind, however long it takes to be filled, as long as the peer gives signs of life. From
    here on there is time for a page of so many bytes."""
    while True:
        exchange.allow(page_bytes)
        frame = exchange.arrived(kind, Kind.ALIVE)
        if frame.head.kind is kind:
            return frame
