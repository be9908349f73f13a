"""The interface of replicas/migration.py that KV routes call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from quire_router.sequences.engine_failure import EngineFailure
    from quire_router.sequences.sequence_state import SequenceState


class Migrator(Protocol):
    """Moves sequences between engines; Migration implements it."""

    def prefill_ended(self, sequence: SequenceState) -> None:
        """Continue a sequence whose prefill side has computed the prompt and dropped the sequence. The sequence needs a
        decode side now, or has ended."""

    def reservation_lost(self, sequence: SequenceState, failure: EngineFailure) -> None:
        """Note that the decode side with the sequence's reservation is lost. The sequence itself still runs at its
        prefill side."""
