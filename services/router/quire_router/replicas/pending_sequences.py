"""Sequences without an engine: sequences that wait for an engine, and sequences whose engine sent the last token and
was lost before their text was complete.

These sequences share a Detokenize stream, which decodes the tokens that the lost engines had sent. Decides nothing; see
migration.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quire_router.replicas.session import MakeDetokenizer
    from quire_router.sequences.sequence_state import SequenceState


class PendingSequences:
    """The Holder of sequences that have no engine. `waiting` has those that wait for an engine, in the order of their
    arrival. A sequence leaves by `leave`, or when its text has ended."""

    def __init__(self, make_detokenizer: MakeDetokenizer) -> None:
        self.waiting: dict[int, SequenceState] = {}
        self._texts: dict[int, SequenceState] = {}
        self._detokenizer = make_detokenizer(self._texts, self.leave)

    def enter(self, sequence: SequenceState) -> None:
        """Take a sequence that has no engine. The sequence waits for an engine, unless it has all its tokens. If it
        has all its tokens or has tokens without text, its remaining text is decoded on this holder's own Detokenize
        stream."""
        sequence.hold(self)
        if not sequence.engine.finish:
            self.waiting[sequence.handle] = sequence
        if sequence.engine.finish or sequence.unconfirmed_ids():
            self._texts[sequence.handle] = sequence
            self._detokenizer.open(sequence)

    def leave(self, sequence: SequenceState) -> None:
        """Forget a sequence, and close it on this holder's Detokenize stream. Idempotent."""
        self.waiting.pop(sequence.handle, None)
        if self._texts.pop(sequence.handle, None) is not None:
            self._detokenizer.close(sequence.handle)

    def abort(self, sequence: SequenceState) -> None:
        self.leave(sequence)

    async def run(self) -> None:
        """Run the Detokenize stream until cancelled."""
        await self._detokenizer.run()
