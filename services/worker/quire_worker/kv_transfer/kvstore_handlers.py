"""The handlers of an agent process that moves pages of a store: a queue for loads and one for stores."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire_worker.kv_transfer.handlers import TransferHandlers
from quire_worker.kv_transfer.load_queue import LoadQueue
from quire_worker.kv_transfer.store_queue import StoreQueue

if TYPE_CHECKING:
    from quire_worker.kv_transfer.handlers import AgentContext
    from quire_worker.kv_transfer.kv_connector import KvConnector


def kvstore_handlers(connector: KvConnector, context: AgentContext) -> TransferHandlers:
    """Both, at work."""
    loads = LoadQueue(connector, context.ring, context.send, context.setup.load_slots)
    return TransferHandlers(loads, StoreQueue(connector, context.ring, context.send))
