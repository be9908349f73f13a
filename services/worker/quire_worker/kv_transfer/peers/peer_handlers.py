"""The handlers of an agent process of peers: pulls from other workers, and exports that they pull."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from quire_worker.kv_transfer.handlers import TransferHandlers
from quire_worker.kv_transfer.peers.export_registry import ExportRegistry
from quire_worker.kv_transfer.peers.peer_port import PeerPort
from quire_worker.kv_transfer.peers.peer_server import serve_peers
from quire_worker.kv_transfer.peers.pull_manager import PullManager
from quire_worker.kv_transfer.transports.nixl_agent import SharedNixlAgent
from quire_worker.kv_transfer.transports.peer_nixl import PeerNixl

if TYPE_CHECKING:
    from quire_worker.kv_transfer.handlers import AgentContext


def peer_handlers(context: AgentContext) -> TransferHandlers:
    """Both, at work."""
    if context.setup.peer_transport == PeerNixl.name:
        agents = SharedNixlAgent(context.ring)
        agents.begin()
        context = replace(context, nixl=agents)
    exports, pulls = ExportRegistry(context), PullManager(context)
    port = PeerPort(context, exports)
    if context.setup.peer_grpc:
        serve_peers(context.setup, port)
    return TransferHandlers(pulls, exports, PoolToPool(exports, pulls))


class PoolToPool:
    """Implements DirectHandler."""

    def __init__(self, exports: ExportRegistry, pulls: PullManager) -> None:
        self.offered = exports.offered
        self.fetched = pulls.fetched
