"""Rules of prefill and decode apart, broken one at a time: what a proof that both are one must notice."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from quire_scheduler.disaggregation.handovers import Handovers
from quire_scheduler.disaggregation.pulls import Pulls
from quire_scheduler.kv.page_allocator import PageAllocator
from quire_worker.engine.export_offers import ExportOffers
from quire_worker.engine.page_states import PageStates
from quire_worker.engine.resident_slots import ResidentSlots
from tests.exactness.mutations import Mutation
from tests.exactness.virtual import virtual_peers
from tests.exactness.virtual.virtual_peers import PeerWeather
from tests.exactness.virtual.virtual_worker import VirtualWorker

if TYPE_CHECKING:
    from pytest import MonkeyPatch

    from quire_common.credit import PageMove
    from quire_scheduler.core.request import Request
    from quire_scheduler.disaggregation.handover import Handover
    from quire_scheduler.kv.page_moves import Move, MoveEnd
    from tests.exactness.virtual.virtual_peers import Peers

ROTTEN = {"peers": PeerWeather(corrupt=0.2)}
BROKEN = {"peers": PeerWeather(break_off=0.2)}
# Pages take so long that their owner could be done with them.
SLOW = {"peers": PeerWeather(page_us=(5_000, 40_000))}


def rot_goes_unnoticed(patch: MonkeyPatch) -> None:
    """A page is taken as it comes."""
    patch.setattr(virtual_peers, "genuine", lambda body, checksum: True)


def offered_before_they_are_filled(patch: MonkeyPatch) -> None:
    """An export offers all of its pages at once."""
    patch.setattr(ExportOffers, "_positions", lambda self, loan: 0)


def what_failed_counts_as_come(patch: MonkeyPatch) -> None:
    """A pull that ended early is taken for whole, by both sides of the decode replica."""
    pulled, arrived = Pulls._pulled, PageStates.arrived

    def all_came(self: Pulls, move: Move, moved: MoveEnd, now: float) -> None:
        pulled(self, move, moved._replace(pages=len(move.pages)), now)

    def all_there(self: PageStates, pages: np.ndarray, count: int, tail_tokens: int = 0) -> None:
        arrived(self, pages, len(pages), tail_tokens)

    patch.setattr(Pulls, "_pulled", all_came)
    patch.setattr(PageStates, "arrived", all_there)


def lent_pages_are_used_again(patch: MonkeyPatch) -> None:
    """Pages are given to the next while others pull them, and nobody looks whether pages are free."""
    patch.setattr(PageAllocator, "lend", lambda self, pages: None)
    patch.setattr(PageAllocator, "take_back", lambda self, pages: None)
    patch.setattr(PageAllocator, "check_integrity", lambda self, *more: None)
    patch.setattr(ResidentSlots, "_check_free", lambda self, own, fresh: None)
    patch.setattr(ResidentSlots, "can_load", lambda self, pages: True)
    patch.setattr(VirtualWorker, "_check_fences", lambda self, new: None)


def the_handed_token_is_drawn_again(patch: MonkeyPatch) -> None:
    """The decode side goes on without the token that the prefill side drew."""
    arrived = Handovers.arrived

    def deaf(self: Handovers, request: Request, handover: Handover, now: float) -> None:
        known = len(request.output)
        arrived(self, request, handover, now)
        del request.output[known:]

    patch.setattr(Handovers, "arrived", deaf)


def any_lease_opens_all(patch: MonkeyPatch) -> None:
    """Who asks gets the pages of whoever exports there, whatever they are called."""

    def first_best(self: Peers, move: PageMove) -> virtual_peers._Export | None:
        address = move.source[0].descriptor
        mine = (export for (where, _, _), export in self.exports.items() if where == address)
        enough = (export for export in mine if len(export.move.hashes) >= move.first_index + len(move.hashes))
        return next(enough, None)

    patch.setattr(virtual_peers.Peers, "find", first_best)


PD_MUTATIONS = (
    Mutation(rot_goes_unnoticed, ROTTEN),
    Mutation(offered_before_they_are_filled, {}),
    Mutation(what_failed_counts_as_come, BROKEN),
    Mutation(lent_pages_are_used_again, SLOW),
    Mutation(the_handed_token_is_drawn_again, {}),
    Mutation(any_lease_opens_all, {}),
)
