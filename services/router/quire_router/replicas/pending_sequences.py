"""Choices that have no engine now: those that wait for one, and those whose last token has come from one that is gone.

Their text goes on meanwhile: what the lost engine said is decoded on a Detokenize stream of this room's own. Decides
nothing: see migration.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quire_router.replicas.session import MakeDetokenizer
    from quire_router.sequences.sequence_state import Choice


class PendingSequences:
    """A Holder. `waiting` is in the order of arrival. A choice leaves by `leave`, or when its text has ended."""

    def __init__(self, make_detokenizer: MakeDetokenizer) -> None:
        self.waiting: dict[int, Choice] = {}
        self._texts: dict[int, Choice] = {}
        self._detokenizer = make_detokenizer(self._texts, self.leave)

    def enter(self, choice: Choice) -> None:
        """It has no engine; with its last token known it needs none."""
        choice.holder = self
        if not choice.finish:
            self.waiting[choice.handle] = choice
        if choice.finish or choice.unconfirmed():
            self._texts[choice.handle] = choice
            self._detokenizer.open(choice)

    def leave(self, choice: Choice) -> None:
        """It is not here any more. Idempotent."""
        self.waiting.pop(choice.handle, None)
        if self._texts.pop(choice.handle, None) is not None:
            self._detokenizer.close(choice.handle)

    def abort(self, choice: Choice) -> None:
        self.leave(choice)

    async def run(self) -> None:
        """Until cancelled."""
        await self._detokenizer.run()
