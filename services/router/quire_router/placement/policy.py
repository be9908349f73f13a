"""What a placement policy is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from quire_router.engine.load import Load


class Candidate(Protocol):
    """A replica that accepts requests now, as a policy may see it."""

    @property
    def instance(self) -> str:
        """Its name in discovery."""

    @property
    def load(self) -> Load:
        """What it said last of its load, all routers' requests included."""

    @property
    def submitted_since_load(self) -> int:
        """Sequences that this router sent it since then."""

    @property
    def in_flight(self) -> int:
        """This router's sequences there."""


class Placement(Protocol):
    """Chooses a replica for a prompt and all of its siblings. Called in the event loop; must not block."""

    def choose(self, candidates: Sequence[Candidate], weight: int) -> int:
        """The index of the choice. `candidates` is never empty; `weight` sequences are about to be sent there."""
