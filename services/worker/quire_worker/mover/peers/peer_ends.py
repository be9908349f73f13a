"""The ends of a mover process of peers: pulls from other workers, and exports that they pull."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from quire_worker.mover.ends import Ends
from quire_worker.mover.peers.export_desk import ExportDesk
from quire_worker.mover.peers.peer_port import PeerPort
from quire_worker.mover.peers.peer_server import serve_peers
from quire_worker.mover.peers.pull_desk import PullDesk
from quire_worker.mover.transports.peer_nixl import PeerNixl
from quire_worker.mover.transports.ring_agent import RingAgent

if TYPE_CHECKING:
    from quire_worker.mover.ends import Equipment


def peer_ends(given: Equipment) -> Ends:
    """Both, at work."""
    if given.setup.peer_transport == PeerNixl.name:
        agents = RingAgent(given.ring)
        agents.begin()
        given = replace(given, nixl=agents)
    exports, pulls = ExportDesk(given), PullDesk(given)
    port = PeerPort(given, exports)
    if given.setup.peer_grpc:
        serve_peers(given.setup, port)
    return Ends(pulls, exports, PeerMemory(exports, pulls))


class PeerMemory:
    """See Direct."""

    def __init__(self, exports: ExportDesk, pulls: PullDesk) -> None:
        self.offered = exports.offered
        self.fetched = pulls.fetched
