"""Slots of which each is held by one job at a time. The number of jobs that hold a slot or wait for one is bounded."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from quire_common.errors import QuireError


class BoundedSlots:
    """Used from one event loop. `overloaded` makes the error of a job that is one too many; its argument is the number
    of the other jobs, those that hold a slot included."""

    def __init__(self, slots: int, max_jobs: int, overloaded: Callable[[int], QuireError]) -> None:
        self._slots = asyncio.Semaphore(slots)
        self._max_jobs = max_jobs
        self._overloaded = overloaded
        self._jobs = 0

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Context manager: wait for a free slot, and hold it inside. Raises the error that `overloaded` makes, at once,
        if `max_jobs` other jobs wait or hold slots."""
        if self._jobs >= self._max_jobs:
            raise self._overloaded(self._jobs)
        self._jobs += 1
        try:
            async with self._slots:
                yield
        finally:
            self._jobs -= 1
