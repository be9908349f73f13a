"""Transport from another worker by NIXL: pages are read out of its ring by the fastest way that UCX finds between both,
RDMA if there is such a network. The data connection only carries the authorisation, the places of the pages, and the
confirmations.

As with shared memory, a page that does not match its header is no proof of damage: the peer may have reused its slot.
"""

from __future__ import annotations

import contextlib
import struct
from typing import TYPE_CHECKING

from quire_common.kv_data.frame import DataConnectionError, FrameKind
from quire_common.pages import copy_body
from quire_worker.kv_transfer.transports.peer_tcp import next_but_alive
from quire_worker.kv_transfer.transports.shared_pages import fetch_shared_pages
from quire_worker.kv_transfer.transports.transport import TransportError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from quire_worker.kv_transfer.peers.peer_access import PeerAccess
    from quire_worker.kv_transfer.peers.pull_end import PullEnd
    from quire_worker.kv_transfer.transports.data_link import DataLink, Exchange
    from quire_worker.kv_transfer.transports.nixl_agent import NixlAgent, SharedNixlAgent
    from quire_worker.kv_transfer.transports.shared_pages import Copy
    from quire_worker.kv_transfer.transports.transport import PageSink, PageTransfer

_BASE = struct.Struct("<Q")
# Pages in one request: what a request costs is the same for one as for many. A peer shows no more than so many.
_AT_ONCE = 8


class PeerNixl:
    """Implements FetchTransport. The link is the pull's, the agent its process's."""

    name = "nixl"

    def __init__(self, link: DataLink, agents: SharedNixlAgent) -> None:
        self._link = link
        self._agents = agents
        self._held = contextlib.ExitStack()

    @classmethod
    def make(cls, end: PullEnd) -> PeerNixl:
        """Return a transport over the pull's link with the process's NIXL agent. Raises ValueError if the process has
        none."""
        if end.nixl is None:
            raise ValueError("this process has no NIXL agent")
        return cls(end.link, end.nixl)

    def offered(self, access: PeerAccess) -> bool:
        return access.tcp is not None

    def fetch(self, transfer: PageTransfer[PeerAccess], sink: PageSink) -> None:
        """Read all remaining pages out of the peer's ring by NIXL, then tell the peer that no more are wanted. The NIXL
        agent is held until `close`. Raises TransportError if it cannot be made or the exchange fails, and NotFound if
        the peer refuses."""
        if transfer.access.tcp is None:
            raise ValueError("this way was not offered")
        try:
            agent = self._held.enter_context(self._agents.using())  # the first takes longer than a peer would wait
        except DataConnectionError as error:
            raise TransportError(str(error)) from error
        with self._link.exchange(transfer.access.tcp, transfer.access.key) as exchange:
            if sink.received_pages < len(transfer.run):
                self._fetch(exchange, agent, transfer, sink)
            exchange.send(FrameKind.DONE)
            exchange.receive_frame(FrameKind.END)

    def close(self) -> None:
        self._link.close()
        self._held.close()

    def _fetch(self, exchange: Exchange, agent: NixlAgent, transfer: PageTransfer[PeerAccess], sink: PageSink) -> None:
        """Ask for the peer's NIXL metadata and its ring's address. Then copy the remaining pages out of that ring as
        the peer shows them, and confirm them; the caller sends DONE. Raises DataConnectionError if the answer has no
        metadata or a read fails, TransportError for a page that does not match (the link is then closed), and NotFound
        if the peer refuses."""
        exchange.send(FrameKind.AGENT)
        frame = next_but_alive(exchange, transfer.page_bytes, FrameKind.PLACED)
        told = bytearray(frame.head.length)
        if len(told) <= _BASE.size:
            raise DataConnectionError("garbage", "there is no agent")
        exchange.receive_payload(frame, memoryview(told))
        (base,) = _BASE.unpack_from(told)
        with agent.peer(bytes(told[_BASE.size :])) as peer:

            @contextlib.contextmanager
            def fetch(places: Sequence[int]) -> Iterator[Copy]:
                """Read the pages at these offsets in the peer's ring in one request, and yield a function that copies
                one of them."""
                with agent.read(peer, [base + place for place in places]) as areas:
                    came = dict(zip(places, areas, strict=True))
                    yield lambda place, header, room: copy_body(header, came[place], room)

            fetch_shared_pages(
                self._link, exchange, FrameKind.SHOW, transfer, sink, fetch, most=_AT_ONCE, mac=transfer.mac
            )


def pack_agent(agent: NixlAgent) -> bytes:
    """Pack the answer to AGENT, with which a peer reads this ring: the ring's address and the agent's metadata."""
    return _BASE.pack(agent.base) + agent.metadata
