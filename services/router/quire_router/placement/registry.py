"""Placement policies by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire_router.placement.least_loaded import LeastLoaded
from quire_router.placement.round_robin import RoundRobin

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from quire_router.placement.policy import Placement

PLACEMENTS: Mapping[str, Callable[[], Placement]] = {"least_loaded": LeastLoaded, "round_robin": RoundRobin}
