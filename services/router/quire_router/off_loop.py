"""Runs long computations, such as writing a long answer, in one thread, so that the event loop stays responsive.

Python's global interpreter lock (GIL) lets one thread run at a time. While another thread computes, the loop may wait
some milliseconds for the GIL after each system call. So the thread pauses after each task for as long as the task
computed. Without pauses, or with several such threads, all streams would stall. A parser written in C keeps the GIL
until it ends, so long bodies are parsed in another process: see front/http/bodies.
"""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from quire_router.tenant_queue import TenantQueue

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")
# Of values that are handled one by one: some 10 to 20 ms.
MOST_VALUES = 8192


class LongWork:
    """One thread with a queue of tasks for each tenant. Tenants take turns: between two tasks of one tenant, each other
    tenant runs at most one. The thread pauses after each task for as long as it computed."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "long-work")
        self._lock = threading.Lock()
        self._waiting: TenantQueue[tuple[Callable[[], Any], Future[Any]]] = TenantQueue()

    async def run(self, function: Callable[[], T], tenant: str) -> T:
        """Queue `function` for the thread, in the tenant's turn, and return its result or raise its exception. If the
        caller is cancelled first, a queued task is removed, which frees what it holds; a running task goes on."""
        future: Future[T] = Future()
        task = function, future
        with self._lock:
            self._waiting.push(tenant, task)
        self._thread.submit(self._run_next)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            with self._lock:
                self._waiting.remove(tenant, task)  # a running task goes on
            raise

    def _run_next(self) -> None:
        """Run the next task, if one is left, and set its result or exception. Then pause for as long as the task used
        the CPU. Called in the thread, once for each task."""
        with self._lock:
            task = self._waiting.pop()
        if task is None:
            return
        function, future = task
        if not future.set_running_or_notify_cancel():
            return
        began_s = time.thread_time()
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)
        del task, function, future  # they hold an answer
        time.sleep(time.thread_time() - began_s)


_LONG_WORK = LongWork()


async def off_loop(function: Callable[[], T], *, heavy: bool, tenant: str) -> T:
    """Call `function` and return its result or raise its exception. If `heavy`, it runs in the one thread for long
    work, in the tenant's turn; otherwise it runs at once in the event loop."""
    return await _LONG_WORK.run(function, tenant) if heavy else function()
