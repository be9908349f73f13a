"""What a library did not pass on: that the task is being cancelled."""

from __future__ import annotations

import asyncio


def raise_if_cancelled() -> None:
    """To be called behind what may lose a cancellation. redis-py sends by `asyncio.wait_for`, which before Python 3.12
    returns as if nothing were where the cancellation comes as the sending ends: a loop would go on for ever."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError
