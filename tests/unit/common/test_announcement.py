"""The address that a service has for its announcement, and the withdrawal of a service without an event loop."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from quire_common.config import ServiceConfig, join_address, split_address
from quire_common.identity.tls_files import TlsFiles
from quire_common.serving import announcement
from quire_common.serving.server import _bind


class ServerStub:
    """As a gRPC server, to which the system gives port 39325."""

    def add_insecure_port(self, address: str) -> int:
        return 39325


class HangingDiscovery:
    """A registry that does not answer a withdrawal."""

    def __init__(self) -> None:
        self.cancelled = False

    async def close(self) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled = True
            raise


def test_withdrawal_that_takes_too_long_leaves_no_loop_open(monkeypatch: pytest.MonkeyPatch) -> None:
    discovery = HangingDiscovery()

    async def announce(*_: object) -> HangingDiscovery:
        return discovery

    monkeypatch.setattr(announcement, "announce", announce)
    monkeypatch.setattr(announcement, "_CLOSE_LIMIT_S", 0.1)
    announced = announcement.ThreadAnnouncement(ServiceConfig(), "worker", "worker-1", "127.0.0.1:1")
    with pytest.raises(TimeoutError):
        announced.close()
    assert announced._loop.is_closed() and discovery.cancelled
    assert announced._thread is not None and not announced._thread.is_alive()


@pytest.mark.parametrize(
    ("listen", "address"),
    [("127.0.0.1:0", "127.0.0.1:39325"), ("[::1]:0", "[::1]:39325"), ("localhost:0", "localhost:39325")],
)
def test_peers_can_dial_the_bound_address(listen: str, address: str) -> None:
    server: Any = ServerStub()
    bound = _bind(server, ServiceConfig(listen=listen), TlsFiles(), "router", lambda error: None)
    assert bound.address == address
    assert join_address(*split_address(bound.address, "address")) == address
