"""MatcherPool: the engine's side of the matcher, with a client for each of its processes. Several processes compute the
masks of a step at once, since Python runs one thread of a process at a time.

A new sequence goes to the process with the fewest sequences, and stays there. If a process is lost, only its own
sequences wait. All processes share the record of grammars that crash a process.
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
    """Implements GrammarMatcher. Belongs to the model thread. All processes start with the first sequence that has a
    grammar."""

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
        """The memory to which all processes write masks."""
        return self._clients[0].ring

    @property
    def pids(self) -> list[int]:
        """The ids of the running processes."""
        return [client.pid for client in self._clients if client.pid is not None]

    @property
    def mask_totals(self) -> tuple[int, int]:
        """Return the number of masks so far, and the nanoseconds that they took."""
        counts, times_ns = zip(*(client.mask_totals for client in self._clients), strict=True)
        return sum(counts), sum(times_ns)

    def open_sequence(self, sequence: TokenSequence, grammar: str) -> RowConstraint:
        """See GrammarMatcher."""
        for client in self._clients:
            client.start()
        client = min(self._clients, key=lambda each: each.sequences)
        constraint = client.open_sequence(sequence, grammar)
        self._client_of[constraint] = client
        return constraint

    def close_sequence(self, constraint: RowConstraint) -> None:
        """See GrammarMatcher."""
        self._client_of.pop(constraint).close_sequence(constraint)

    def poll(self) -> bool:
        """See GrammarMatcher."""
        changed = [client.poll() for client in self._clients]  # a list, so that each client is polled
        return any(changed)

    def hold(self, constraint: RowConstraint) -> None:
        """See GrammarMatcher."""
        self._client_of[constraint].hold(constraint)

    def close(self) -> None:
        """End the processes, and release the ring. Idempotent."""
        for client in self._clients:
            client.close()
