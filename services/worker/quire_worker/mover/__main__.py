"""`python -m quire_worker.mover`: the mover process, started by its worker alone."""

from __future__ import annotations

import sys

from quire_worker.mover.carrier import KvStoreCarrier
from quire_worker.mover.child import run_child

if __name__ == "__main__":
    run_child(sys.argv[1:], KvStoreCarrier.connect)
