"""Builds the handlers of an agent process: either queues for a kvstore's loads and stores, or pulls from other workers
and exports that other workers pull."""

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
    """Return the handlers of a kvstore's agent process: a queue of loads, which owns the first half of the ring's
    slots, and a queue of stores. Each queue starts a thread."""
    loads = LoadQueue(connector, context.ring, context.send, context.setup.load_slots)
    return TransferHandlers(loads, StoreQueue(connector, context.ring, context.send))


def peer_handlers(context: AgentContext) -> TransferHandlers:
    """Return the handlers of a peers' agent process: pulls, exports, and the pages that go from pool to pool. Start the
    port on which peers connect, the gRPC server if an address is configured, and NIXL if that is the chosen
    transport."""
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
    """Return the handlers of this process: those of peers if the setup says so, else those of a kvstore, to which a
    channel is opened."""
    if context.setup.peers:
        return peer_handlers(context)
    return kvstore_handlers(KvStoreConnector.connect(context.setup, context.mac), context)
