"""Who hears of a session's steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from quire_scheduler.core.outputs import SessionOutputs


class OutputSink(Protocol):
    """Called from the loop, in order; must not block."""

    def deliver(self, outputs: SessionOutputs) -> bool:
        """Take a step's outputs; False where it cannot keep up: it is ended, and its requests are aborted."""

    def beat(self) -> None:
        """Now and then: say something if nothing was said for a while, so that silence means death."""
