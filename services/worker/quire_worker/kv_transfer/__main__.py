"""`python -m quire_worker.kv_transfer`: a KV transfer agent's process, started by its worker alone."""

from __future__ import annotations

import sys

from quire_worker.kv_transfer.agent_handlers import make_handlers
from quire_worker.kv_transfer.agent_main import run_agent

if __name__ == "__main__":
    run_agent(sys.argv[1:], make_handlers)
