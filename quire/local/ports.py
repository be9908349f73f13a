"""Reserves ports of this host for a stack. The kernel gives no other process these ports when it asks for a free port,
even while a service of the stack is down.

Each port is bound by a socket that never listens. This socket and those of the services have SO_REUSEADDR, so the
services can still listen. A process that asks for just this port may still get it. So the code that starts a service
must be ready to choose another port.
"""

from __future__ import annotations

import errno
import socket
from contextlib import ExitStack


class HeldPorts:
    """Distinct free ports, from the moment they are chosen until `close`."""

    def __init__(self) -> None:
        self._sockets = ExitStack()
        self._ports: set[int] = set()

    def choose(self, host: str) -> int:
        """Bind a free port of the host, hold it until `close`, and return it."""
        return self._hold(host, 0)

    def reserve(self, host: str, port: int) -> int:
        """Hold this port until `close`, and return it. Raises OSError if it is held here already, on any host, if it
        cannot be bound, or if a server could not listen on it now; in the last case, it is held all the same."""
        if port in self._ports:
            raise OSError(errno.EADDRINUSE, "The stack uses this port already")
        self._hold(host, port)
        try_listening(host, port)
        return port

    def close(self) -> None:
        """Release all ports."""
        self._sockets.close()
        self._ports.clear()

    def _hold(self, host: str, port: int) -> int:
        """Bind a socket to the port (0: any free one), without listening, and hold it until `close`. Returns the port's
        number. Raises OSError if it cannot be bound."""
        holder = self._sockets.enter_context(_reusable(host))
        holder.bind((host, port))
        held = int(holder.getsockname()[1])
        self._ports.add(held)
        return held


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Return distinct ports that are free now. They are not held, so other processes may take them."""
    held = HeldPorts()
    try:
        return [held.choose(host) for _ in range(count)]
    finally:
        held.close()


def is_free(host: str, port: int) -> bool:
    """Whether a server could listen on the port now. The port is tried, and is not held afterwards."""
    try:
        try_listening(host, port)
    except OSError:
        return False
    return True


def try_listening(host: str, port: int) -> None:
    """Listen on the port, and release it at once. Raises OSError if a server could not listen on it now."""
    with _reusable(host) as candidate:
        candidate.bind((host, port))
        candidate.listen(1)


def _reusable(host: str) -> socket.socket:
    """Return a new TCP socket for the host's address family, with SO_REUSEADDR, so that a server may bind the same
    port."""
    candidate = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    candidate.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return candidate
