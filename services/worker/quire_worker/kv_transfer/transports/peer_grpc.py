"""Transport from another worker over gRPC: the frames of the TCP transport, in a gRPC stream. For networks that allow
nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire_worker.kv_transfer.transports.peer_tcp import fetch_all

if TYPE_CHECKING:
    from quire_worker.kv_transfer.peers.peer_access import PeerAccess
    from quire_worker.kv_transfer.peers.pull_end import PullEnd
    from quire_worker.kv_transfer.transports.data_link import DataLink
    from quire_worker.kv_transfer.transports.transport import PageSink, PageTransfer


class PeerGrpc:
    """Implements FetchTransport. The link is the pull's, and makes its connections with a TunnelDial."""

    name = "grpc"

    def __init__(self, link: DataLink) -> None:
        self._link = link

    @classmethod
    def make(cls, end: PullEnd) -> PeerGrpc:
        return cls(end.tunnel_link)

    def offered(self, access: PeerAccess) -> bool:
        return access.grpc is not None

    def fetch(self, transfer: PageTransfer[PeerAccess], sink: PageSink) -> None:
        """Receive all remaining pages in frames, carried by a gRPC stream, then tell the peer that no more are
        wanted."""
        if transfer.access.grpc is None:
            raise ValueError("this way was not offered")
        fetch_all(self._link, transfer.access.grpc, transfer, sink)

    def close(self) -> None:
        self._link.close()
