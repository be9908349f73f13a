"""Another GPU of the host: the engine's device reads pages where they lie, in the peer's own memory. All that a
connection carries is which page lies where, and whether the lease stood until after they were read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire_common.columns import i32
from quire_common.kv_data.frame import DataConnectionError, Kind

if TYPE_CHECKING:
    from quire_worker.mover.peers.peer_access import PeerAccess
    from quire_worker.mover.peers.pool_landing import PoolLanding
    from quire_worker.mover.transports.data_link import DataLink, Exchange
    from quire_worker.mover.transports.transport import Cargo, Landing
    from quire_worker.step import Int32


class PeerCuda:
    """See Source. The link is the pull's. Pages land in the pool, not in the ring's slots."""

    name = "cuda_ipc"

    def __init__(self, link: DataLink, pool: PoolLanding) -> None:
        self._link = link
        self._pool = pool

    def offered(self, access: PeerAccess) -> bool:
        """See Source."""
        return access.memory and bool(access.socket or access.tcp)

    def fetch(self, cargo: Cargo[PeerAccess], landing: Landing) -> None:
        """See Source. In the end the peer is told that nothing more is wanted."""
        access = cargo.access
        address = access.socket or access.tcp
        if not address:
            raise ValueError("this way was not offered")
        try:
            with self._link.exchange(address, access.key) as exchange:
                while self._pool.reached < len(cargo.run):
                    self._pool.fetch(self._located(exchange, cargo))
                exchange.send(Kind.DONE)
                exchange.arrived(Kind.END)
                self._pool.keep_last()
        finally:
            self._pool.drop()

    def close(self) -> None:
        """See Source."""
        self._link.close()

    def _located(self, exchange: Exchange, cargo: Cargo[PeerAccess]) -> Int32:
        """Where the next pages lie; at least one. Any answer shows that the lease stood until now."""
        first = cargo.access.first_index + self._pool.reached
        exchange.send(Kind.LOCATE, page=first)
        while True:
            exchange.allow(cargo.page_bytes)
            frame = exchange.arrived(Kind.PLACED, Kind.ALIVE)
            self._pool.keep()
            if frame.head.kind is Kind.PLACED:
                break
        payload = bytearray(frame.head.length)
        if payload:
            exchange.receive_payload(frame, memoryview(payload))
        places = i32(bytes(payload), "places")
        if frame.head.page != first or not len(places):
            raise DataConnectionError(
                "garbage", f"{len(places)} places from {frame.head.page} on are not what comes next"
            )
        return places[: len(cargo.run) - self._pool.reached]
