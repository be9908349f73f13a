"""Another worker of the same host: pages are copied out of the ring in which its engine has put them. All that a socket
carries is who may do so, and which page lies where.

The slot of a page is the peer's again once it was told that the page is taken, or when it has lost patience. So a page
that is not what its header says is no proof of damage: another way is tried.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

from quire_common.kv_data.frame import DataConnectionError, Kind
from quire_worker.mover.transports.shown_pages import take_shown

if TYPE_CHECKING:
    from quire_worker.mover.peers.peer_access import PeerAccess
    from quire_worker.mover.transports.data_link import DataLink, Exchange
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
        frame = exchange.arrived(Kind.END)
        if not frame.fds:
            raise DataConnectionError("garbage", "no descriptor came")
        with self._maps.using(frame.fds.pop()) as ring:
            take_shown(self._link, exchange, Kind.GET, cargo, landing, lambda _: nullcontext(ring.copy), most=1)
