"""OutputSink: the receiver of a session's outputs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from quire_scheduler.core.outputs import SessionOutputs


class OutputSink(Protocol):
    """Receives the outputs of one session, in order. Its methods are called in the event loop and must not block."""

    def deliver(self, outputs: SessionOutputs) -> bool:
        """Take a step's outputs. Returns False if the sink cannot keep up: then its session is closed and the requests
        are aborted."""

    def beat(self) -> None:
        """Send something if nothing was sent for a while, so that the receiver can take silence for death. Called
        regularly."""
