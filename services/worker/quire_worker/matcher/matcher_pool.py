"""MatcherPool: the engine's side of the matcher: one client for each of its processes. The masks of a step are made in
several processes at once, since Python runs one thread of a process at a time.

A sequence belongs to one process from its start to its end: to the one that had the fewest. A process that is lost
delays its own sequences alone. What is known of grammars that end a process holds for all processes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from quire_common.sequence import Sequence as TokenSequence
    from quire_worker.matcher.mask_ring import MaskRing
    from quire_worker.matcher.matcher_client import MatcherClient
    from quire_worker.matcher.row_constraint import RowConstraint


class MatcherPool:
    """A GrammarMatcher. Belongs to the model thread. All processes start with the first sequence that has a grammar."""

    def __init__(self, clients: Sequence[MatcherClient]) -> None:
        self._clients = clients
        self._client_of: dict[RowConstraint, MatcherClient] = {}
        self._wake: Callable[[], None] = lambda: None

    @property
    def wake(self) -> Callable[[], None]:
        """See GrammarMatcher."""
        return self._wake

    @wake.setter
    def wake(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        for client in self._clients:
            client.set_wake(wake)

    @property
    def ring(self) -> MaskRing:
        """The memory in which all processes leave masks."""
        return self._clients[0].ring

    @property
    def pids(self) -> list[int]:
        """The processes that there are."""
        return [client.pid for client in self._clients if client.pid is not None]

    @property
    def mask_totals(self) -> tuple[int, int]:
        """Return the number of masks that were made, and the nanoseconds that they took."""
        counts, times_ns = zip(*(client.mask_totals for client in self._clients), strict=True)
        return sum(counts), sum(times_ns)

    def open_sequence(self, sequence: TokenSequence, grammar: str) -> RowConstraint:
        """Begin to apply a grammar to a sequence that starts. Returns at once."""
        for client in self._clients:
            client.start()
        client = min(self._clients, key=lambda each: each.sequences)
        constraint = client.open_sequence(sequence, grammar)
        self._client_of[constraint] = client
        return constraint

    def close_sequence(self, constraint: RowConstraint) -> None:
        """Forget a sequence that has left its slot."""
        self._client_of.pop(constraint).close_sequence(constraint)

    def poll(self) -> bool:
        """Take in what the processes have said; returns whether `is_ready` or `failure` of some sequence may have
        changed since the last call."""
        changed = [client.poll() for client in self._clients]  # of each, whatever the others say
        return any(changed)

    def hold(self, constraint: RowConstraint) -> None:
        """Note that a step had no mask for a sequence that still has its slot."""
        self._client_of[constraint].hold(constraint)

    def close(self) -> None:
        """End the processes, and release the ring. Idempotent."""
        for client in self._clients:
            client.close()
