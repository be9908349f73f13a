"""Whether a gRPC client takes what it is sent. One that does not loses its request, and with it the places it holds.

gRPC takes a message when the client's window has room, so that no more than one waits in us. Knows no contract.
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
    """From now on until `close`; `stall_s` 0: for ever patient. What a client reads after the end is the error."""

    __slots__ = ("_generation", "_stall_s", "_watch", "_watchdog", "_writing")

    def __init__(self, watchdog: Watchdog, generation: Generation, stall_s: float) -> None:
        self._writing = False
        self._generation = generation
        self._stall_s = stall_s
        self._watchdog = watchdog
        self._watch = watchdog.watch(stall_s or float("inf"), self._drop, self._owes)

    def sends(self) -> None:
        """A message is handed to gRPC."""
        self._writing = True
        self._watch.hear()

    def sent(self) -> None:
        """gRPC took it."""
        self._writing = False

    def close(self) -> None:
        """Idempotent."""
        self._watchdog.drop(self._watch)

    def _owes(self) -> bool:
        return self._writing

    def _drop(self) -> None:
        """End the request now. The call hangs in gRPC until the client reads or goes, and holds nothing else."""
        log.warning("the client takes nothing", request_id=self._generation.caller.request_id, seconds=self._stall_s)
        error = Aborted(
            "CLIENT_STALLED",
            f"The client took nothing of its answer for {self._stall_s:g} s.",
            "Read the answer as it comes, or raise --client-stall-s.",
        )
        self._generation.abandon(error)
        self._generation.close()
