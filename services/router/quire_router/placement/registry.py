"""The placement policies by name: for whole requests, and for the prefill and decode sides of a request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire_router.placement.batch_load import BatchLoad
from quire_router.placement.pair_cost import PairCost
from quire_router.placement.pickers import LowestCost, RoundRobin
from quire_router.placement.policy import Placement
from quire_router.placement.prefill_work import PrefillWork
from quire_router.placement.pull_work import PullWork
from quire_router.placement.same_session import SameSession, WithoutCrowds

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from quire_router.placement.prefix_view import PrefixView
    from quire_router.placement.replica_table import ReplicaTable

# A row of a full batch costs its request about as much as so many prompt tokens, and a row that is not free far more.
_FULL_BATCH_TOKENS = 512.0
_NO_ROW_TOKENS = 16384.0
# Who is prefilled elsewhere comes for the steps alone, and every row makes all of them longer.
_FULL_DECODE_TOKENS = 16384.0


@dataclass(frozen=True, slots=True)
class Weights:
    """The weights of the scores. `cache` and `load` are for PrefillWork, `pull` is for PullWork."""

    cache: float = 4.0
    load: float = 0.5
    pull: float = 0.25


def _round_robin(table: ReplicaTable, view: PrefixView, weights: Weights) -> Placement:
    return Placement(RoundRobin())


def _least_loaded(table: ReplicaTable, view: PrefixView, weights: Weights) -> Placement:
    return Placement(LowestCost(), [BatchLoad(table)])


def _session(table: ReplicaTable, view: PrefixView, weights: Weights) -> Placement:
    return Placement(LowestCost(), [SameSession(table)], [WithoutCrowds(table)])


def _kv_aware(table: ReplicaTable, view: PrefixView, weights: Weights) -> Placement:
    work = PrefillWork(table, view, weights.cache, weights.load)
    return Placement(LowestCost(), [work, BatchLoad(table, _FULL_BATCH_TOKENS, _NO_ROW_TOKENS)])


def _kv_aware_pairs(table: ReplicaTable, view: PrefixView, weights: Weights) -> PairCost:
    decode = Placement(LowestCost(), [BatchLoad(table, _FULL_DECODE_TOKENS, _NO_ROW_TOKENS)])
    return PairCost(table, _kv_aware(table, view, weights), decode, PullWork(table, view, weights.pull))


@dataclass(frozen=True, slots=True)
class Policies:
    """The policies of one name. `pairs` None: the replica that would run the whole request decodes it, and `prefill`
    chooses the prefill side."""

    whole: Placement
    prefill: Placement
    pairs: PairCost | None = None


def policies(name: str, table: ReplicaTable, view: PrefixView, weights: Weights) -> Policies:
    """Make the policies of this name, one of PLACEMENTS: for whole requests, for the prefill side and, for `kv_aware`,
    for pairs. Each of them has its own round-robin turns. Raises KeyError for an unknown name."""
    make, pairs = PLACEMENTS[name], PAIRS.get(name)
    return Policies(
        make(table, view, weights),
        make(table, view, weights),
        pairs(table, view, weights) if pairs is not None else None,
    )


PLACEMENTS: Mapping[str, Callable[[ReplicaTable, PrefixView, Weights], Placement]] = {
    "kv_aware": _kv_aware,
    "least_loaded": _least_loaded,
    "round_robin": _round_robin,
    "session": _session,
}
PAIRS: Mapping[str, Callable[[ReplicaTable, PrefixView, Weights], PairCost]] = {"kv_aware": _kv_aware_pairs}
# Policies that look at pages: only these need the streams of page events.
PAGE_AWARE = ("kv_aware",)
