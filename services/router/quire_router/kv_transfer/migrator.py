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
        """Note that the decode side has lost or dropped the sequence's reservation. The sequence itself goes on at its
        prefill side, unless the migrator fails it here, because too many engines were lost or all replicas are full."""
