"""Another worker by NIXL: pages are read out of its ring by whatever UCX finds fastest between both, RDMA where there
is such a network. All that a data connection carries is who may do so, which page lies where, and that it was taken.

As with shared memory, a page that is not what its header says is no proof of damage: its slot may have been taken back.
"""

from __future__ import annotations

import contextlib
import struct
from typing import TYPE_CHECKING

from quire_common.columns import pack_i32
from quire_common.kv_data.frame import DataBroken, Kind
from quire_common.pages import PageCorrupt, check_parts
from quire_worker.mover.transports.peer_tcp import SOON_S, next_but_alive
from quire_worker.mover.transports.transport import TransportDown

if TYPE_CHECKING:
    from quire_worker.mover.peers.peer_access import PeerAccess
    from quire_worker.mover.transports.data_link import DataLink, Exchange
    from quire_worker.mover.transports.ring_agent import Agent, RingAgent
    from quire_worker.mover.transports.transport import Cargo, Landing

_BASE = struct.Struct("<Q")


class PeerNixl:
    """See Source. The link is the pull's, the agent its process's."""

    name = "nixl"

    def __init__(self, link: DataLink, agents: RingAgent) -> None:
        self._link = link
        self._agents = agents
        self._held = contextlib.ExitStack()

    def offered(self, access: PeerAccess) -> bool:
        """See Source."""
        return access.tcp is not None

    def fetch(self, cargo: Cargo[PeerAccess], landing: Landing) -> None:
        """See Source. In the end the peer is told that nothing more is wanted."""
        if cargo.access.tcp is None:
            raise ValueError("this way was not offered")
        try:
            agent = self._held.enter_context(self._agents.using())  # the first takes longer than a peer would wait
        except DataBroken as error:
            raise TransportDown(str(error)) from error
        with self._link.exchange(cargo.access.tcp, cargo.access.key) as exchange:
            if landing.landed < len(cargo.run):
                self._fetch(exchange, agent, cargo, landing)
            exchange.send(Kind.DONE)
            exchange.arrived(Kind.END)

    def close(self) -> None:
        """See Source."""
        self._link.close()
        self._held.close()

    def _fetch(self, exchange: Exchange, agent: Agent, cargo: Cargo[PeerAccess], landing: Landing) -> None:
        exchange.send(Kind.AGENT)
        arrived = next_but_alive(exchange, cargo.page_bytes, Kind.PLACED)
        told = bytearray(arrived.head.length)
        if len(told) <= _BASE.size:
            raise DataBroken("garbage", "there is no agent")
        exchange.receive_payload(arrived, memoryview(told))
        (base,) = _BASE.unpack_from(told)
        first = cargo.access.first_index
        with agent.peer(bytes(told[_BASE.size :])) as peer:
            try:
                exchange.send(Kind.SHOW, pack_i32(range(first + landing.landed, first + len(cargo.run))))
                while landing.landed < len(cargo.run):
                    self._take_page(exchange, agent, (peer, base), cargo, landing)
                exchange.arrived(Kind.END)
            except PageCorrupt as error:
                self._link.close()
                raise TransportDown(str(error)) from error

    def _take_page(
        self, exchange: Exchange, agent: Agent, ring: tuple[str, int], cargo: Cargo[PeerAccess], landing: Landing
    ) -> None:
        index, (peer, base) = landing.landed, ring
        if not exchange.connection.wait(SOON_S):
            landing.tell()
        head = next_but_alive(exchange, cargo.page_bytes, Kind.TAKE).head
        if head.page != cargo.access.first_index + index:
            raise DataBroken("garbage", f"page {head.page} is not what comes next")
        room = landing.room()
        checksum = agent.copy(peer, base + head.offset, head.page_header, room)
        check_parts(head.page_header, room, cargo.run.key(index), cargo.dtype, cargo.page_bytes, checksum)
        exchange.send(Kind.TAKEN, page=head.page)
        landing.land()


def pack_agent(agent: Agent) -> bytes:
    """What the peer is told: where the ring lies, and how its memory is reached."""
    return _BASE.pack(agent.base) + agent.metadata
