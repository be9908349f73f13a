"""The engine's interface to page moves: its requests to a KV transfer agent, and the agent's results.

The engine only submits and polls; bytes travel elsewhere. If a move cannot be done, it ends as failed, and never as an
error. A sequence recomputes the pages that did not arrive. If another slot holds such pages too, the sequence ends with
PAGES_LOST instead (see WaitingSlots.check_slot).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from quire_common.credit import MoveKind

if TYPE_CHECKING:
    from collections.abc import Callable

    from quire_common.credit import PageMove


POOL_FILLING = frozenset({MoveKind.LOAD, MoveKind.PULL})
"""Moves that fill pages of this worker."""


@dataclass(frozen=True, slots=True)
class MoveResult:
    """A move that has ended. `pages` is the number of its pages, from the first, that are whole at their
    destination."""

    id: int
    ok: bool
    pages: int
    us: int


class KvTransferAgent(Protocol):
    """Carries pages. All methods but `close` are called from the model thread. They do not wait for I/O, but
    `cancel_all`, and `take_results` after a failure, wait for copies under way. An agent begins copies of a pool's
    pages only within these calls. On a GPU, copies go on after the call, and peers may read offered pages
    themselves."""

    wake: Callable[[], None]
    """Set by the replica; called, from whatever thread, when `take_results` has something to do."""

    def submit(self, move: PageMove) -> bool:
        """Accept a move; returns False if the move is refused (queue full, kind unknown), which counts as failed."""

    def offer_pages(self, move_id: int, pages: int) -> None:
        """Announce that the first `pages` pages of an export are filled, so that peers may read them. Before the first
        offer, no page may be read."""

    def end_move(self, move_id: int) -> None:
        """Let a move end as failed, with the pages that have arrived. When `take_results` returns it, no page will be
        read or written for it any more. Unknown moves are ignored: they have ended."""

    def take_results(self) -> list[MoveResult]:
        """Return the moves that ended since the last call, each once. Called at every step boundary, and after `wake`.
        This call copies pages, a bounded number of bytes each time."""

    def cancel_all(self) -> None:
        """Forget all moves. When this returns, no page will be read or written on their behalf."""

    def close(self) -> None:
        """Cancel, and release everything."""


class NoTransferAgent:
    """For an engine that moves no pages: refuses every move."""

    def __init__(self) -> None:
        self.wake: Callable[[], None] = lambda: None

    def submit(self, move: PageMove) -> bool:
        """Refused."""
        return False

    def offer_pages(self, move_id: int, pages: int) -> None:
        """To nobody."""

    def end_move(self, move_id: int) -> None:
        """Nothing to end."""

    def take_results(self) -> list[MoveResult]:
        """None."""
        return []

    def cancel_all(self) -> None:
        """Nothing to forget."""

    def close(self) -> None:
        """Nothing to release."""
