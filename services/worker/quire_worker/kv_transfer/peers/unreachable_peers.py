"""UnreachablePeers: by which transports which peers could not be reached lately, for all pulls of a process.

Silence is noticed after seconds: whoever pulls next tries such a way after the others, and not for ever.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from quire_worker.kv_transfer.peers.peer_access import PeerAccess

    Route = tuple[str, tuple[str, int] | None, tuple[str, int] | None]

UNREACHABLE_S = 30.0
_REMEMBERED = 1024


class UnreachablePeers:
    """Used by the threads of all pulls."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._until_s: OrderedDict[Route, float] = OrderedDict()

    def mark_unreachable(self, transport: str, access: PeerAccess) -> None:
        """Nothing came this way."""
        with self._lock:
            self._until_s[transport, access.tcp, access.grpc] = self._clock() + UNREACHABLE_S
            if len(self._until_s) > _REMEMBERED:
                self._until_s.popitem(last=False)

    def is_unreachable(self, transport: str, access: PeerAccess) -> bool:
        """Whether that was not long ago."""
        with self._lock:
            return self._clock() < self._until_s.get((transport, access.tcp, access.grpc), 0.0)
