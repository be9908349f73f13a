"""The part of the replica choice that KV routes call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from quire_router.sequences.engine_failure import EngineFailure
    from quire_router.sequences.sequence_state import SequenceState


class Migrator(Protocol):
    """The migration."""

    def prefill_ended(self, sequence: SequenceState) -> None:
        """The prefill side has done its part and has dropped the sequence, which needs a decode side or has ended."""

    def reservation_lost(self, sequence: SequenceState, failure: EngineFailure) -> None:
        """A decode side with a reservation for the sequence is lost; the sequence itself is well."""
