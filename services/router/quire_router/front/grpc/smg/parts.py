"""SmgParts: the parts of the router that the VllmEngine service uses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quire_router.api_keys import ApiKeys
    from quire_router.config import RouterConfig
    from quire_router.front.parameters.request_limits import Limits
    from quire_router.limits.rate_limits import RateLimits
    from quire_router.replicas.fleet import Fleet
    from quire_router.requests.admission import Admission
    from quire_router.requests.catalog import Catalog
    from quire_router.requests.pipeline import Pipeline
    from quire_router.watchdog import Watchdog


@dataclass(frozen=True)
class SmgParts:
    """The parts of the router, as one record. Their classes describe them."""

    pipeline: Pipeline
    catalog: Catalog
    fleet: Fleet
    admission: Admission
    keys: ApiKeys
    rates: RateLimits
    limits: Limits
    config: RouterConfig
    watchdog: Watchdog
