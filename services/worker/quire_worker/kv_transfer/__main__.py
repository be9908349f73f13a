"""`python -m quire_worker.kv_transfer`: a KV transfer agent's process, started by its worker alone."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from quire_worker.kv_transfer.agent_main import run_agent
from quire_worker.kv_transfer.kv_connector import KvStoreConnector
from quire_worker.kv_transfer.kvstore_handlers import kvstore_handlers
from quire_worker.kv_transfer.peers.peer_handlers import peer_handlers

if TYPE_CHECKING:
    from quire_worker.kv_transfer.handlers import AgentContext, TransferHandlers


def make_handlers(context: AgentContext) -> TransferHandlers:
    """The process of a kvstore's agent, or of the peers'."""
    if context.setup.peers:
        return peer_handlers(context)
    return kvstore_handlers(KvStoreConnector.connect(context.setup), context)


if __name__ == "__main__":
    run_agent(sys.argv[1:], make_handlers)
