"""`python -m quire_worker.mover`: a mover process, started by its worker alone."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from quire_worker.mover.carrier import KvStoreCarrier
from quire_worker.mover.child import run_child
from quire_worker.mover.lanes import lanes
from quire_worker.mover.peers.peer_ends import peer_ends

if TYPE_CHECKING:
    from quire_worker.mover.ends import Ends, Equipment


def make_ends(given: Equipment) -> Ends:
    """Of a kvstore's mover, or of the peers'."""
    if given.setup.peers:
        return peer_ends(given)
    return lanes(KvStoreCarrier.connect(given.setup), given)


if __name__ == "__main__":
    run_child(sys.argv[1:], make_ends)
