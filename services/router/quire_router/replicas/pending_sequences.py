"""Sequences without an engine: those that wait for one, and those whose last token came from an engine that is gone.

Their text goes on meanwhile: what the lost engine said is decoded on a Detokenize stream of their own. Decides
nothing: see migration.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quire_router.replicas.session import MakeDetokenizer
    from quire_router.sequences.sequence_state import SequenceState


class PendingSequences:
    """A Holder. `waiting` is in the order of arrival. A sequence leaves by `leave`, or when its text has ended."""

    def __init__(self, make_detokenizer: MakeDetokenizer) -> None:
        self.waiting: dict[int, SequenceState] = {}
        self._texts: dict[int, SequenceState] = {}
        self._detokenizer = make_detokenizer(self._texts, self.leave)

    def enter(self, sequence: SequenceState) -> None:
        """Hold a sequence that has no engine. It waits for one, unless all its tokens are known. Tokens without text
        yet are decoded on this holder's own Detokenize stream."""
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
