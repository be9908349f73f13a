"""MatcherPool: the engine's side of the matcher, with a client for each of its processes. Several processes compute the
masks of a step at once, since Python runs one thread of a process at a time.

A new sequence goes to the process with the fewest sequences, if possible one that was not just lost. It may move to
another process while it waits for a mask slot, and stays once it has one. If a process is lost, only its own sequences
wait. All processes share the refusals of grammars that crashed a process, but each counts its own crashes.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from quire_worker.matcher.row_constraint import NO_MASK_SLOT

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from quire_common.sequence import Sequence as TokenSequence
    from quire_worker.matcher.mask_ring import MaskRing
    from quire_worker.matcher.matcher_client import MatcherClient
    from quire_worker.matcher.row_constraint import RowConstraint


class MatcherPool:
    """Implements GrammarMatcher. Belongs to the model thread, except for `close`. All processes start with the first
    sequence that has a grammar."""

    def __init__(self, clients: Sequence[MatcherClient]) -> None:
        self._clients = clients
        self._client_of: dict[RowConstraint, MatcherClient] = {}
        self._wake: Callable[[], None] = lambda: None
        # Whether a link has called `_wake_engine` since the last poll: for a message, a lost process or a ping. The
        # links' threads set it.
        self._woken = False
        for client in clients:
            client.set_wake(self._wake_engine)

    @property
    def wake(self) -> Callable[[], None]:
        """See GrammarMatcher."""
        return self._wake

    @wake.setter
    def wake(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    @property
    def ring(self) -> MaskRing:
        """The memory to which all processes write masks."""
        return self._clients[0].ring

    @property
    def pids(self) -> list[int]:
        """The ids of the running processes."""
        return [client.pid for client in self._clients if client.pid is not None]

    @property
    def sequences(self) -> int:
        """The number of sequences that have started and not ended."""
        return sum(client.sequences for client in self._clients)

    @property
    def mask_totals(self) -> tuple[int, int]:
        """Return the sum over all processes of MaskRing's `mask_totals`."""
        counts, times_ns = zip(*(client.mask_totals for client in self._clients), strict=True)
        return sum(counts), sum(times_ns)

    def start(self) -> None:
        """See GrammarMatcher."""
        for client in self._clients:
            client.start()

    def open_sequence(self, sequence: TokenSequence, grammar: str) -> RowConstraint:
        """Begin to apply a grammar to a sequence, in the process that has the fewest sequences and was not just lost,
        if possible. Starts all processes. Returns the sequence's record at once."""
        self.start()
        client = _choose(self._clients)
        constraint = client.open_sequence(sequence, grammar)
        self._client_of[constraint] = client
        return constraint

    def close_sequence(self, constraint: RowConstraint) -> None:
        """End a sequence that has left its slot. Its mask slot may go to a sequence that waits at another process."""
        self._client_of.pop(constraint).close_sequence(constraint)
        self._share_mask_slots()

    def poll(self) -> bool:
        """Process the messages of all processes. Returns whether `is_ready` or `failure` of a sequence may have
        changed. Returns False at once if there is no sequence and no link has woken the engine, since most steps have
        no grammar."""
        if not self._woken and not self._client_of:
            return False
        self._woken = False  # first, so that a message that comes meanwhile is seen next time
        changed = [client.poll() for client in self._clients]  # a list, so that each client is polled
        return any(changed)

    def hold(self, constraint: RowConstraint) -> None:
        """Mark a sequence as not ready until its mask has come, after a step that lacked the mask."""
        self._client_of[constraint].hold(constraint)

    def close(self) -> None:
        """End the processes at the same time, and release the ring. Idempotent."""
        with ThreadPoolExecutor(len(self._clients), "matcher-close") as threads:
            for _ in threads.map(lambda client: client.close(), self._clients):
                pass

    def _wake_engine(self) -> None:
        """Note that `poll` has something to do, and wake the engine. From any thread."""
        self._woken = True
        self._wake()

    def _share_mask_slots(self) -> None:
        """Give free mask slots to sequences that wait for one of another process, in the order in which they
        started."""
        if not any(client.has_waiting for client in self._clients):
            return
        for constraint, client in list(self._client_of.items()):
            free = [each for each in self._clients if each.has_free_mask_slot]
            if not free:
                return
            if constraint.mask_slot == NO_MASK_SLOT:
                chosen = _choose(free)
                client.give_waiting(constraint, chosen)
                self._client_of[constraint] = chosen


def _choose(clients: Sequence[MatcherClient]) -> MatcherClient:
    """Return the client whose process has the fewest sequences, if possible one that was not just lost: a process that
    cannot stay alive has none, and would get all."""
    return min(clients, key=lambda each: (each.was_just_lost, each.sequences))
