"""What an agent process is made of: queues for a kvstore's loads and stores, or pulls from other workers and exports
that they pull."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from quire_worker.kv_transfer.handlers import TransferHandlers
from quire_worker.kv_transfer.kv_connector import KvStoreConnector
from quire_worker.kv_transfer.kvstore_queues import LoadQueue, StoreQueue
from quire_worker.kv_transfer.peers.export_registry import ExportRegistry
from quire_worker.kv_transfer.peers.peer_port import PeerPort
from quire_worker.kv_transfer.peers.pull_manager import PullManager
from quire_worker.kv_transfer.peers.servicer import serve_peers
from quire_worker.kv_transfer.transports.nixl_agent import SharedNixlAgent
from quire_worker.kv_transfer.transports.peer_nixl import PeerNixl

if TYPE_CHECKING:
    from quire_worker.kv_transfer.handlers import AgentContext
    from quire_worker.kv_transfer.kv_connector import KvConnector


def kvstore_handlers(connector: KvConnector, context: AgentContext) -> TransferHandlers:
    """For pages of a store: both queues, at work."""
    loads = LoadQueue(connector, context.ring, context.send, context.setup.load_slots)
    return TransferHandlers(loads, StoreQueue(connector, context.ring, context.send))


def peer_handlers(context: AgentContext) -> TransferHandlers:
    """For pages of other workers: pulls and exports, at work."""
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


def make_handlers(context: AgentContext) -> TransferHandlers:
    """The process of a kvstore's agent, or of the peers'."""
    if context.setup.peers:
        return peer_handlers(context)
    return kvstore_handlers(KvStoreConnector.connect(context.setup), context)
