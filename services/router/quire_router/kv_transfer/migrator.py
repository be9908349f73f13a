"""The part of the replica choice that KV routes call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from quire_router.sequences.engine_failure import EngineFailure
    from quire_router.sequences.sequence_state import SequenceState


class Migrator(Protocol):
    """The migration."""

    def prefill_ended(self, sequence: SequenceState) -> None:
        """Its prefill side has done its part and has let go of it: it needs a decode side, or has ended."""

    def reservation_lost(self, sequence: SequenceState, failure: EngineFailure) -> None:
        """An engine that was to have it is no more; the sequence itself is well."""
