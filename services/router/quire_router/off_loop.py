"""Runs long computations, such as parsing a large body, in one thread, so that the event loop stays responsive.

Python's global interpreter lock (GIL) lets one thread run at a time. While another thread computes, the loop may wait
some milliseconds for the GIL after each system call. A parser written in C keeps the GIL until it ends. So the thread
pauses after each task for as long as the task computed. Without pauses, or with several such threads, all streams would
stall.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

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
        self._waiting: dict[str, deque[tuple[Callable[[], Any], Future[Any]]]] = {}
        """In the order of the tenants' next turns."""

    async def run(self, function: Callable[[], T], tenant: str) -> T:
        """Call `function` in the thread and return its result or raise its exception. If the caller is cancelled first,
        the queued task is removed, which frees the request body that it holds."""
        future: Future[T] = Future()
        task = function, future
        with self._lock:
            self._waiting.setdefault(tenant, deque()).append(task)
        self._thread.submit(self._run_next)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            self._drop(tenant, task)
            raise

    def _drop(self, tenant: str, task: tuple[Callable[[], Any], Future[Any]]) -> None:
        """Remove a task that has not begun. A running task goes on."""
        with self._lock:
            tasks = self._waiting.get(tenant, deque())
            if task in tasks:
                tasks.remove(task)
                if not tasks:
                    del self._waiting[tenant]

    def _run_next(self) -> None:
        """Run one task, if one is left, and pause. Called in the thread, once for each task."""
        with self._lock:
            if not self._waiting:
                return
            tenant, tasks = next(iter(self._waiting.items()))
            del self._waiting[tenant]
            function, future = tasks.popleft()
            if tasks:
                self._waiting[tenant] = tasks
        if not future.set_running_or_notify_cancel():
            return
        began_s = time.thread_time()
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)
        del function, future  # they hold a body and what it became
        time.sleep(time.thread_time() - began_s)


_LONG_WORK = LongWork()


async def off_loop(function: Callable[[], T], *, heavy: bool, tenant: str) -> T:
    """Call `function`, in the thread for long work if `heavy`, in the tenant's turn, and return its result or raise its
    exception."""
    return await _LONG_WORK.run(function, tenant) if heavy else function()
