"""EndingTasks: cancels tasks, and waits until they have ended. It does not know what the tasks do."""

from __future__ import annotations

import asyncio


class EndingTasks:
    """Tasks that were dropped and have not ended yet. Callers drop each task only once, since a second cancellation
    would interrupt the cleanup of the task. All methods run in the event loop."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def drop(self, task: asyncio.Task[None]) -> None:
        """Cancel a task, which is forgotten when it has ended. A task that has not begun first begins, so that its
        `finally` blocks run."""
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        # In the next turn of the loop, the task has begun.
        asyncio.get_running_loop().call_soon(task.cancel)

    async def wait(self) -> None:
        """Wait until the dropped tasks have ended. Their errors are not raised."""
        await asyncio.gather(*self._tasks, return_exceptions=True)
