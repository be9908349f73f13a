"""A relay to a Redis that does to what passes whatever a test wants."""

from __future__ import annotations

from tests.tcp_relay import TcpRelay


class RedisProxy(TcpRelay):
    """On this machine."""

    def __init__(self, target: int, mode: str = "pass") -> None:
        super().__init__(("127.0.0.1", target), mode)
        self.url = f"redis://127.0.0.1:{self.port}/0"
