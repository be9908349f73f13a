"""PlacementService: placement as the router runs it, with the configured policy, and with the page index if the policy
uses pages.

If a stream of page events is lost, placements become worse; nothing else happens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from quire_router import metrics
from quire_router.pages.page_directory import PageDirectory
from quire_router.pages.page_watchers import PageWatchers
from quire_router.placement.disaggregation import Disaggregation, SplitOptions
from quire_router.placement.placer import Placer
from quire_router.placement.prefix_view import PrefixView
from quire_router.placement.registry import PAGE_AWARE, Weights, policies

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from quire_common.discovery import Endpoint
    from quire_router.config import RouterConfig
    from quire_router.placement.replica_table import ReplicaRow, ReplicaTable


class HeldPages(NamedTuple):
    """The number of pages that an instance of a service has, according to the index."""

    service: str
    instance: str
    pages: int


class PlacementService:
    """`placer` places requests. `wants_pages` says whether the configured policy uses the page index."""

    def __init__(self, config: RouterConfig, table: ReplicaTable, row_of: Callable[[str], ReplicaRow | None]) -> None:
        self.wants_pages = config.placement in PAGE_AWARE
        self.directory = PageDirectory(config.page_index_pages, config.expected_pages_s)
        self._row_of = row_of
        self._view = PrefixView(table, self.directory)
        # By service and instance: the number under which the directory has its pages.
        self._holders: dict[tuple[str, str], int] = {}
        self._watchers = PageWatchers(config, self.directory, self._on_holder_moved)
        weights = Weights(config.placement_cache_weight, config.placement_load_cost)
        named = policies(config.placement, table, self._view, weights)
        view = self._view if self.wants_pages else None
        self.placer = Placer(table, named, view, Disaggregation(table, named, _split_options(config), view))
        metrics.placement_expected.set_function(lambda: self.placer.expected_tokens)

    def update(self, service: str, endpoints: Sequence[Endpoint]) -> None:
        """Follow the page events of exactly these schedulers or kvstores, discovery's newest list for `service`. Does
        nothing if the policy does not use pages. The fleet must have taken the list before."""
        if self.wants_pages:
            self._watchers.update(service, endpoints)

    def held_pages(self) -> list[HeldPages]:
        """Return the number of pages of each scheduler and kvstore of which a whole snapshot has come, also if it has
        none."""
        return [HeldPages(*holder, self.directory.pages_of(number)) for holder, number in self._holders.items()]

    async def run(self) -> None:
        """Sweep the pages of holders that have left, and set the index's metrics, until cancelled; streams run from
        `update` on. Return at once if the policy does not use pages."""
        if self.wants_pages:
            await self._watchers.run()

    async def close(self) -> None:
        """End all streams of page events."""
        await self._watchers.close()

    def _on_holder_moved(self, service: str, instance: str, number: int, life: int) -> None:
        """Record the number under which the directory has an instance's pages now (-1: none); called when its number or
        life changes. For a scheduler, also write the number to its row of the replica table, if it has one. For a
        kvstore, write the number to the PrefixView, and record there the life (boot id) of which the directory has
        every page; 0 (some are missing) removes the record."""
        self._holders.pop((service, instance), None)
        if number >= 0:
            self._holders[service, instance] = number
        if service == "scheduler":
            row = self._row_of(instance)
            if row is not None:
                row.set_holder(number)
            return
        view = self._view
        view.stores.pop(instance, None)
        view.lives.pop(instance, None)
        if number >= 0:
            view.stores[instance] = number
        if life:
            view.lives[instance] = life


def _split_options(config: RouterConfig) -> SplitOptions:
    """Make the options of Disaggregation from the configuration."""
    return SplitOptions(
        least_tokens=config.pd_least_tokens,
        threshold_tokens=config.pd_threshold_tokens,
        interference=config.pd_interference,
        load_cost=config.placement_load_cost,
        whole_too=config.pd_between_both,
        by_rates=config.pd_by_rates,
    )
