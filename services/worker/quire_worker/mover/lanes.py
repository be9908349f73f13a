"""The ends of a mover process that moves pages of a store: a lane for loads and one for stores."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire_worker.mover.ends import Ends
from quire_worker.mover.load_lane import LoadLane
from quire_worker.mover.store_lane import StoreLane

if TYPE_CHECKING:
    from quire_worker.mover.carrier import Carrier
    from quire_worker.mover.ends import Equipment


def lanes(carrier: Carrier, given: Equipment) -> Ends:
    """Both, at work."""
    loads = LoadLane(carrier, given.ring, given.send, given.setup.load_slots)
    return Ends(loads, StoreLane(carrier, given.ring, given.send))
