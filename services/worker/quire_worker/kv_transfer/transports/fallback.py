"""FallbackPolicy: decides which transport is tried next, when a failed transport is tried again, and which failures
count.

The same policy serves the kvstore's transports and those between workers; FallbackRules state the differences. A
*route* is the destination of a failed attempt. A failure towards one peer does not affect the route to another.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

from quire_common.telemetry.logs import get_logger
from quire_worker.kv_transfer.transports.transport import TransportError

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable


class Named(Protocol):
    """A transport of any kind."""

    name: str


T = TypeVar("T", bound=Named)

log = get_logger(__name__)
_MOST_PAUSES = 1024


@dataclass(frozen=True, slots=True)
class FallbackRules:
    """The consequences of a failure, for one kind of traffic. Pauses double from the first to the longest."""

    first_pause_s: float
    max_pause_s: float
    counts: Callable[[TransportError], bool]
    """Whether the transport is paused on that route."""
    ends_attempt: Callable[[TransportError], bool]
    """Whether no other transport is worth a try."""
    paused_are_tried_last: bool
    """Else transports are not tried at all while they are paused."""


# A store that answers by no transport is a miss: nothing is lost by leaving a transport alone.
STORE_RULES = FallbackRules(
    first_pause_s=1.0,
    max_pause_s=30.0,
    counts=lambda error: True,
    ends_attempt=lambda error: False,
    paused_are_tried_last=False,
)
# Silence is noticed after seconds. A peer that never answered may be behind a network that lets nothing through, for
# which other pulls need not wait. A peer that was there and falls silent hangs, by every transport.
PEER_RULES = FallbackRules(
    first_pause_s=30.0,
    max_pause_s=30.0,
    counts=lambda error: error.silent and error.unreached,
    ends_attempt=lambda error: error.silent and not error.unreached,
    paused_are_tried_last=True,
)


@dataclass(slots=True)
class _Pause:
    """The pause of a transport that has failed on a route. `next_length_s` is the length of its next pause."""

    until_s: float
    next_length_s: float


class FallbackPolicy:
    """Remembers the pauses by transport and route. Used by any thread."""

    def __init__(self, rules: FallbackRules, clock: Callable[[], float] = time.monotonic) -> None:
        self._rules = rules
        self._clock = clock
        self._lock = threading.Lock()
        self._pauses: OrderedDict[tuple[str, Hashable], _Pause] = OrderedDict()

    def try_in_turn(self, transports: Iterable[T], route: Hashable, attempt: Callable[[T], None]) -> T | None:
        """Call `attempt` with one transport after the other, as `in_order` lists them, until one succeeds, and return
        this transport. Returns None if all fail, if none may be tried, or if the rules end the attempt after an error.
        An attempt fails by a TransportError, which is logged and not raised, and may pause the transport on this route.
        A success ends the transport's pauses on the route. Any other exception passes through."""
        for transport in self.in_order(transports, route):
            try:
                attempt(transport)
            except TransportError as error:
                self._record_failure(transport.name, route, error)
                if self._rules.ends_attempt(error):
                    return None
                continue
            self._record_success(transport.name, route)
            return transport
        return None

    def in_order(self, transports: Iterable[T], route: Hashable) -> list[T]:
        """Return the transports to try, in order. `transports` are in order of preference; those that are paused on the
        route come last, or are left out if the rules say so."""
        ready, paused = list[T](), list[T]()
        for transport in transports:
            (paused if self._is_paused(transport.name, route) else ready).append(transport)
        return ready + paused if self._rules.paused_are_tried_last else ready

    def _is_paused(self, name: str, route: Hashable) -> bool:
        """Whether a failure of this transport on this route has paused it, and the pause is not over."""
        with self._lock:
            pause = self._pauses.get((name, route))
            return pause is not None and self._clock() < pause.until_s

    def _record_failure(self, name: str, route: Hashable, error: TransportError) -> None:
        """Log a transport's failure and, if the rules count it, pause the transport on this route from now on. The
        first pause is `first_pause_s` long. After each further failure, also one during a pause, the new pause is twice
        as long as the one before, up to `max_pause_s`; a success makes the next pause a first one again. Only the 1024
        pauses that began last are kept."""
        pause_s = 0.0
        if self._rules.counts(error):
            with self._lock:
                before = self._pauses.pop((name, route), None)
                pause_s = self._rules.first_pause_s if before is None else before.next_length_s
                longer_s = min(2 * pause_s, self._rules.max_pause_s)
                self._pauses[name, route] = _Pause(self._clock() + pause_s, longer_s)
                if len(self._pauses) > _MOST_PAUSES:
                    self._pauses.popitem(last=False)
        log.warning("a transport failed", transport=name, silent=error.silent, cause=str(error), paused_for_s=pause_s)

    def _record_success(self, name: str, route: Hashable) -> None:
        """Forget the pauses of a transport on this route: its next pause is a first one."""
        with self._lock:
            self._pauses.pop((name, route), None)
