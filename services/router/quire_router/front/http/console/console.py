"""Puts the console together: its routes, and the objects behind them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.routing import Route

from quire_router.front.http.console.actions import ConsoleActions
from quire_router.front.http.console.events import EVENTS_PATH, ConsoleEvents
from quire_router.front.http.console.page import file_routes
from quire_router.front.http.console.snapshot import Snapshots, SnapshotSources
from quire_router.front.http.console.tier_stats_client import TierStatsClient

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from quire_common.discovery import Endpoint
    from quire_router.api_keys import ApiKeys
    from quire_router.config import RouterConfig
    from quire_router.placement.placement_service import PlacementService
    from quire_router.replicas.fleet import Fleet
    from quire_router.requests.admission import Admission
    from quire_router.requests.catalog import Catalog
    from quire_router.requests.live_generations import LiveGenerations
    from quire_router.text.tokenizer_pool import TokenizerPool


class Console:
    """One per process. `routes` are for the public port."""

    def __init__(
        self,
        config: RouterConfig,
        instance: str,
        keys: ApiKeys,
        fleet: Fleet,
        pool: TokenizerPool,
        admission: Admission,
        live: LiveGenerations,
        catalog: Catalog,
        placement: PlacementService,
        open_transfers: Callable[[], int],
        changed: Callable[[], None],
    ) -> None:
        """`changed` is called when the router's readiness may have changed."""
        self._stores = TierStatsClient(config)
        sources = SnapshotSources(
            instance=instance,
            process=config.http_worker,
            in_flight_limit=config.max_concurrent_requests,
            fleet=fleet,
            pool=pool,
            admission=admission,
            live=live,
            held_pages=placement.held_pages,
            stores=lambda: self._stores.last,
            open_transfers=open_transfers,
            tenant_name=keys.tenant_name,
            model_name=catalog.public_name,
            with_actions=lambda: bool(keys),
        )
        self.events = ConsoleEvents(Snapshots(sources), self._stores, keys, lambda watched: live.watch(watched=watched))
        self._actions = ConsoleActions(keys, fleet, admission, live, config.drain_timeout_s, changed)
        self.routes = [
            *file_routes(),
            Route(EVENTS_PATH, self.events, methods=["GET"], name="console events"),
            *self._actions.routes(),
        ]

    def update_kvstores(self, endpoints: Sequence[Endpoint]) -> None:
        """Take discovery's newest list of kvstores."""
        self._stores.update(endpoints)

    async def close(self) -> None:
        """End all streams of snapshots, and cancel the calls to schedulers (see ConsoleActions.close)."""
        await self.events.close()
        await self._actions.close()
