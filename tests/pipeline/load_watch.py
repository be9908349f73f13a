"""The scheduler's own account of what it has: tests wait there until requests have come to it, or have left it."""

from __future__ import annotations

import time
from collections.abc import Callable

from quire.local.stack import LocalStack
from quire.v1 import scheduler_pb2, scheduler_pb2_grpc
from tests.pipeline.mutual_tls import dial

LIMIT_S = 60.0


class LoadWatch:
    """A context. Every question opens a stream of its own: no frame is older than it."""

    def __init__(self, stack: LocalStack) -> None:
        self._channel = dial(stack, "scheduler")
        self._stub = scheduler_pb2_grpc.SchedulerStub(self._channel)

    def __enter__(self) -> LoadWatch:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()

    def wait_idle(self, limit_s: float) -> None:
        """Until nothing runs, waits or references a page."""
        self._wait(lambda load: load.running == load.waiting == load.referenced_pages == 0, limit_s)

    def wait_busy(self) -> None:
        """Until pages are referenced."""
        self._wait(lambda load: load.referenced_pages > 0)

    def wait_crowded(self, requests: int) -> None:
        """Until so many run or wait."""
        self._wait(lambda load: load.running + load.waiting >= requests)

    def _wait(self, wanted: Callable[[scheduler_pb2.Load], bool], limit_s: float = LIMIT_S) -> None:
        deadline = time.monotonic() + limit_s
        loads = self._stub.WatchLoad(scheduler_pb2.WatchLoadRequest(interval_ms=20))
        try:
            for load in loads:
                if wanted(load):
                    return
                assert time.monotonic() < deadline, f"after {limit_s} s: {load}"
            raise AssertionError("the scheduler ended its stream")
        finally:
            loads.cancel()
