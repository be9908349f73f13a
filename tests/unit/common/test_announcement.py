"""A service without an event loop that withdraws its announcement."""

from __future__ import annotations

import asyncio

import pytest

from quire_common.config import ServiceConfig
from quire_common.serving import announcement


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
