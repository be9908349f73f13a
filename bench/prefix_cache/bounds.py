"""Upper bounds of any prefix cache over the trace of a run: a cache that never evicts, and one that knows the
future."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Visit:
    """One request that ran alone: the pages that it might have found, and all full pages that it left."""

    wanted: tuple[bytes, ...]
    left: tuple[bytes, ...]
    needed: int
    """Pages that it held at its end."""
    hits: int
    """Pages that it did find."""


def never_evicting(visits: list[Visit]) -> int:
    """Return the hits with unlimited memory."""
    held: set[bytes] = set()
    hits = 0
    for visit in visits:
        hits += _run(visit.wanted, held)
        held.update(visit.left)
    return hits


def knowing_the_future(visits: list[Visit], pages: int) -> int:
    """Return the hits of a cache of this many pages that evicts the page that is used again last (Belady)."""
    next_use = _next_uses(visits)
    held: dict[bytes, int] = {}
    hits = 0
    for visit, uses in zip(visits, next_use, strict=True):
        hits += _run(visit.wanted, held)
        mine = {*visit.wanted, *visit.left}
        others = sorted((held[page], page) for page in held if page not in mine)
        room = pages - visit.needed
        # Who shares a prefix wants its tail no earlier than its head, so ties are all that could break a chain.
        held = {page: use for use, page in others[: max(room, 0)]}
        held |= {page: uses[page] for page in visit.left}
    return hits


def _next_uses(visits: list[Visit]) -> list[dict[bytes, int]]:
    """Return, for each visit, when each page that it leaves is used next. For other pages, the last known value
    holds."""
    latest: dict[bytes, int] = {}
    uses: list[dict[bytes, int]] = []
    for index in range(len(visits) - 1, -1, -1):
        uses.append({page: latest.get(page, len(visits)) for page in visits[index].left})
        latest |= dict.fromkeys(visits[index].wanted, index)
    return uses[::-1]


def _run(wanted: tuple[bytes, ...], held: set[bytes] | dict[bytes, int]) -> int:
    return next((index for index, page in enumerate(wanted) if page not in held), len(wanted))
