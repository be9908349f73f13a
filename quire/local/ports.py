"""Free ports on this host. Choosing is racy: who starts a service on one must be ready to choose again."""

from __future__ import annotations

import socket
from contextlib import ExitStack


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Distinct ports that nobody listens on now; held together while choosing, so that none comes twice."""
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket(_family(host))) for _ in range(count)]
        for candidate in sockets:
            candidate.bind((host, 0))
        return [candidate.getsockname()[1] for candidate in sockets]


def is_free(host: str, port: int) -> bool:
    """Whether a server could bind the port now."""
    with socket.socket(_family(host)) as candidate:
        candidate.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            candidate.bind((host, port))
            candidate.listen(1)
        except OSError:
            return False
    return True


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
