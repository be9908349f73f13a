"""Who a watcher believes to be there. Pure bookkeeping: knows neither Redis nor the clock."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from quire_common.discovery.endpoint import Endpoint


class Membership:
    """Arrivals count at once. Departures count only while the source is trusted.

    A source that was away, or came back having lost its memory, says nothing about who has left until everybody had
    time to report again: `hold_s`.
    """

    def __init__(self, hold_s: float) -> None:
        self._hold_s = hold_s
        self._hold_until = 0.0
        self._life: str | None = None
        self._known: dict[str, Endpoint] = {}
        self._shown: list[Endpoint] | None = None

    def outage(self) -> None:
        """The source did not answer."""
        self._hold_until = float("inf")

    def update(self, found: Mapping[str, Endpoint], life: str | None, now_s: float) -> None:
        """Take the source's answer. Instances that it does not name are dropped, but not until `hold_s` after an
        outage, or after `life` has changed, which means that the source has lost its memory."""
        if self._hold_until == float("inf") or (self._life is not None and life != self._life):
            self._hold_until = now_s + self._hold_s
        self._life = life if life is not None else self._life
        if now_s < self._hold_until:
            self._known.update(found)
        else:
            self._known = dict(found)

    def news(self) -> list[Endpoint] | None:
        """Return all endpoints, sorted by instance, if they differ from those returned last; else None."""
        current = [self._known[name] for name in sorted(self._known)]
        if current == self._shown:
            return None
        self._shown = current
        return list(current)
