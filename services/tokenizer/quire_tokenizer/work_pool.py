"""Threads for work that would hold up the event loop, with a bounded queue before them.

The tokenizers library lets go of the interpreter lock while it works, so threads do help.
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
    """Runs functions off the loop; refuses when `max_waiting` are under way. Used from one event loop."""

    def __init__(self, threads: int, max_waiting: int) -> None:
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="work")
        self._max_waiting = max_waiting
        self._under_way = 0

    async def run(self, function: Callable[[], T]) -> T:
        """Run the function in a thread, and return its result or raise its exception. Raises Overloaded where too many
        wait. A caller that leaves does not stop the function."""
        if self._under_way >= self._max_waiting:
            raise Overloaded(
                "TOKENIZER_OVERLOADED",
                f"{self._under_way} texts are waiting to be encoded.",
                "Retry, or run more tokenizers.",
                retry_after_s=1.0,
            )
        self._under_way += 1
        future = asyncio.get_running_loop().run_in_executor(self._threads, function)
        future.add_done_callback(self._done)  # also when the caller has gone away: the thread is busy until then
        return await asyncio.shield(future)

    def close(self) -> None:
        """Do not wait for what runs."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _done(self, future: asyncio.Future[T]) -> None:
        self._under_way -= 1
        if not future.cancelled():
            future.exception()  # seen, even if its caller has gone away
