"""Ports on this host that are kept for a stack: nobody is given them, also while a service of the stack is down.

Each is bound by a socket that never listens, with SO_REUSEADDR as the services' own have it: so they may still listen.
Another process that insists on one, rather than asking for any free one, may get it; who starts a service must be ready
to choose again.
"""

from __future__ import annotations

import socket
from contextlib import ExitStack


class HeldPorts:
    """Distinct free ports, from the moment they are chosen until `close`."""

    def __init__(self) -> None:
        self._sockets = ExitStack()

    def choose(self, host: str) -> int:
        """One that nobody has."""
        return self._hold(host, 0)

    def reserve(self, host: str, port: int) -> bool:
        """Hold this port. Returns False if somebody else has it."""
        try:
            self._hold(host, port)
        except OSError:
            return False
        return is_free(host, port)

    def close(self) -> None:
        """Give all back."""
        self._sockets.close()

    def _hold(self, host: str, port: int) -> int:
        holder = self._sockets.enter_context(_reusable(host))
        holder.bind((host, port))
        return int(holder.getsockname()[1])


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Return distinct ports that nobody has now, and that anybody may take from now on."""
    held = HeldPorts()
    try:
        return [held.choose(host) for _ in range(count)]
    finally:
        held.close()


def is_free(host: str, port: int) -> bool:
    """Whether a server could listen on the port now."""
    with _reusable(host) as candidate:
        try:
            candidate.bind((host, port))
            candidate.listen(1)
        except OSError:
            return False
    return True


def _reusable(host: str) -> socket.socket:
    candidate = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    candidate.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return candidate
