"""Reserves ports of this host for a stack. The kernel gives no other process these ports when it asks for a free port,
even while a service of the stack is down.

Each port is bound by a socket that never listens. This socket and those of the services have SO_REUSEADDR, so the
services can still listen. A process that asks for just this port may still get it. So the code that starts a service
must be ready to choose another port.
"""

from __future__ import annotations

import socket
from contextlib import ExitStack


class HeldPorts:
    """Distinct free ports, from the moment they are chosen until `close`."""

    def __init__(self) -> None:
        self._sockets = ExitStack()

    def choose(self, host: str) -> int:
        """Bind a free port of the host, hold it until `close`, and return it."""
        return self._hold(host, 0)

    def reserve(self, host: str, port: int) -> bool:
        """Hold this port until `close`. Returns False if it cannot be bound, or if a server could not listen on it now;
        in the second case, it is held all the same."""
        try:
            self._hold(host, port)
        except OSError:
            return False
        return is_free(host, port)

    def close(self) -> None:
        """Release all ports."""
        self._sockets.close()

    def _hold(self, host: str, port: int) -> int:
        """Bind a socket to the port (0: any free one), without listening, and hold it until `close`. Returns the port's
        number. Raises OSError if it cannot be bound."""
        holder = self._sockets.enter_context(_reusable(host))
        holder.bind((host, port))
        return int(holder.getsockname()[1])


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Return distinct ports that are free now. They are not held, so other processes may take them."""
    held = HeldPorts()
    try:
        return [held.choose(host) for _ in range(count)]
    finally:
        held.close()


def is_free(host: str, port: int) -> bool:
    """Whether a server could listen on the port now. The port is tried, and is not held afterwards."""
    with _reusable(host) as candidate:
        try:
            candidate.bind((host, port))
            candidate.listen(1)
        except OSError:
            return False
    return True


def _reusable(host: str) -> socket.socket:
    """Return a new TCP socket for the host's address family, with SO_REUSEADDR, so that a server may bind the same
    port."""
    candidate = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    candidate.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return candidate
