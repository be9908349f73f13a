"""HttpWorkers: the end of the other processes."""

from __future__ import annotations

import asyncio
import signal
from typing import TYPE_CHECKING

from quire_router.config import RouterConfig
from quire_router.http_workers import HttpWorkers

if TYPE_CHECKING:
    import pytest


class ProcessStub:
    """A process that runs until it gets a signal."""

    pid = 1

    def __init__(self) -> None:
        self.signals: list[int] = []
        self._ended = asyncio.Event()

    def send_signal(self, number: int) -> None:
        self.signals.append(number)
        self._ended.set()

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    async def wait(self) -> int:
        await self._ended.wait()
        return 0


async def test_a_process_that_starts_while_the_router_leaves_is_told_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    process, starting, may_start = ProcessStub(), asyncio.Event(), asyncio.Event()

    async def start(*command: str, stdin: int) -> ProcessStub:
        starting.set()
        await may_start.wait()
        return process

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start)
    workers = HttpWorkers(RouterConfig(http_workers=2, metrics_listen=""), "router", 8000)
    workers.start()
    await starting.wait()
    workers.leave()
    may_start.set()
    await workers.drain(5.0)
    assert process.signals == [signal.SIGTERM]
    await workers.close()
