"""HttpWorkers: the start and the end of the other processes."""

from __future__ import annotations

import asyncio
import signal

import pytest

from quire_router import http_workers
from quire_router.config import RouterConfig
from quire_router.http_workers import HttpWorkers


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


class Delays:
    """As a Backoff that waits for nothing. `events` says what was asked of it."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def reset(self) -> None:
        self.events.append("reset")

    async def wait(self) -> None:
        self.events.append("wait")
        await asyncio.sleep(0)


async def test_a_process_that_cannot_be_started_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    process, delays, started = ProcessStub(), Delays(), asyncio.Event()
    results: list[ProcessStub | OSError] = [process, OSError("too many processes"), OSError("no memory")]

    async def start(*command: str, stdin: int) -> ProcessStub:
        result = results.pop()
        if isinstance(result, OSError):
            raise result
        started.set()
        return result

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start)
    monkeypatch.setattr(http_workers, "Backoff", lambda: delays)
    workers = HttpWorkers(RouterConfig(http_workers=2, metrics_listen=""), "router", 8000)
    workers.start()
    async with asyncio.timeout(10):
        await started.wait()
    await workers.close()
    assert delays.events == ["wait", "wait"] and process.signals == [signal.SIGTERM]


@pytest.mark.parametrize(("steady_s", "events"), [(0.0, ["reset", "wait"]), (60.0, ["wait"])])
async def test_the_backoff_begins_again_after_a_process_that_ran_for_long(
    steady_s: float, events: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, delays, started = ProcessStub(), ProcessStub(), Delays(), asyncio.Event()
    processes = [second, first]
    first.kill()

    async def start(*command: str, stdin: int) -> ProcessStub:
        process = processes.pop()
        if process is second:
            started.set()
        return process

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start)
    monkeypatch.setattr(http_workers, "Backoff", lambda: delays)
    monkeypatch.setattr(http_workers, "_STEADY_S", steady_s)
    workers = HttpWorkers(RouterConfig(http_workers=2, metrics_listen=""), "router", 8000)
    workers.start()
    async with asyncio.timeout(10):
        await started.wait()
    await workers.close()
    assert delays.events == events
