"""Ends the request of a gRPC client that stops reading its answer, and so releases the admission slots that the request
holds.

gRPC takes a message from the router when the client's flow-control window has room. So at most one message waits in the
router. This module knows no contract.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire_common.errors import Aborted
from quire_common.telemetry.logs import get_logger

if TYPE_CHECKING:
    from quire_router.requests.generation import Generation
    from quire_router.watchdog import Watchdog

log = get_logger(__name__)


class ClientWatch:
    """Watches a client until `close`. If the client takes no message for `stall_s` (0: never), its request ends, and
    the client reads an error at the end."""

    __slots__ = ("_generation", "_stall_s", "_watch", "_watchdog", "_writing")

    def __init__(self, watchdog: Watchdog, generation: Generation, stall_s: float) -> None:
        self._writing = False
        self._generation = generation
        self._stall_s = stall_s
        self._watchdog = watchdog
        self._watch = watchdog.watch(stall_s or float("inf"), self._drop, self._owes)

    def sends(self) -> None:
        """Note that the router has handed a message to gRPC. The client's time to take it begins."""
        self._writing = True
        self._watch.hear()

    def sent(self) -> None:
        """Note that gRPC has taken the message. Until the next message, silence of the client is no stall."""
        self._writing = False

    def close(self) -> None:
        """Stop watching. Idempotent."""
        self._watchdog.drop(self._watch)

    def _owes(self) -> bool:
        return self._writing

    def _drop(self) -> None:
        """Log a warning, end the generation with the error CLIENT_STALLED, drop its waiting output, and release its
        admission slots. The watchdog calls this. The call itself stays in gRPC until the client reads or leaves."""
        log.warning("the client takes nothing", request_id=self._generation.caller.request_id, seconds=self._stall_s)
        error = Aborted(
            "CLIENT_STALLED",
            f"The client read nothing of its answer for {self._stall_s:g} s.",
            "Read the answer as it comes, or raise --client-stall-s.",
        )
        self._generation.abandon(error)
        self._generation.close()
