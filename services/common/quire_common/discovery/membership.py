"""Membership: the instances that a watcher believes to exist. Membership knows neither Redis nor the clock."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from quire_common.discovery.endpoint import Endpoint


class Membership:
    """New instances count at once. Missing instances are dropped only while the source is trusted.

    After an outage, or after the source has lost its memory, the list of the source may lack instances that still run.
    So for `hold_s`, in which every instance can register again, none is dropped.
    """

    def __init__(self, hold_s: float) -> None:
        self._hold_s = hold_s
        self._hold_until = 0.0
        self._life: str | None = None
        self._known: dict[str, Endpoint] = {}
        self._shown: list[Endpoint] | None = None

    def outage(self) -> None:
        """Note that the source did not answer."""
        self._hold_until = float("inf")

    def update(self, found: Mapping[str, Endpoint], life: str | None, now_s: float) -> None:
        """Take the source's answer at the time `now_s`. Instances in `found` count at once. Others are dropped, except
        within `hold_s` of the first answer after an outage, or of an answer whose `life` differs from the known one,
        which means that the source has lost its memory. `life` None means that the source did not say; if a life is
        known, None counts as a different one, but does not replace it."""
        if self._hold_until == float("inf") or (self._life is not None and life != self._life):
            self._hold_until = now_s + self._hold_s
        self._life = life if life is not None else self._life
        if now_s < self._hold_until:
            self._known.update(found)
        else:
            self._known = dict(found)

    def members_if_changed(self) -> list[Endpoint] | None:
        """Return all endpoints, sorted by instance, if they differ from those returned last, or if this is the first
        call, even if there is none; else None."""
        current = [self._known[name] for name in sorted(self._known)]
        if current == self._shown:
            return None
        self._shown = current
        return list(current)
