"""WorkPool: threads for work that would block the event loop, with a bounded queue.

The tokenizers library releases the GIL while it works, so threads run in parallel.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

from quire_common.errors import Overloaded

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


class WorkPool:
    """Runs functions in threads. The pool refuses a function when `max_jobs` functions run or wait. Only one event loop
    may use the pool."""

    def __init__(self, threads: int, max_jobs: int) -> None:
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="work")
        self._max_jobs = max_jobs
        self._under_way = 0

    async def run(self, function: Callable[[], T], *, completes: bool = False) -> T:
        """Run the function in a thread, and return its result or raise its exception. Raises Overloaded if `max_jobs`
        functions run or wait, unless this one completes work that was done before (`completes`). If the caller is
        cancelled, the function still runs to its end."""
        if self._under_way >= self._max_jobs and not completes:
            raise overloaded(f"{self._under_way} texts are waiting to be encoded.")
        self._under_way += 1
        future = asyncio.get_running_loop().run_in_executor(self._threads, function)
        future.add_done_callback(self._done)  # also when the caller has gone away: the thread is busy until then
        return await asyncio.shield(future)

    def close(self) -> None:
        """Close the pool without waiting for running functions. Waiting ones are cancelled."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _done(self, future: asyncio.Future[T]) -> None:
        """Count a function as ended. Reads its exception, so that asyncio does not log it if the caller has left."""
        self._under_way -= 1
        if not future.cancelled():
            future.exception()  # seen, even if its caller has gone away


def overloaded(message: str) -> Overloaded:
    """Return the error of work for which too much other work waits."""
    return Overloaded("TOKENIZER_OVERLOADED", message, "Retry, or run more tokenizers.", retry_after_s=1.0)
