"""Whether the present task is being cancelled, which CancelledError alone does not tell, nor every library pass on."""

from __future__ import annotations

import asyncio


def is_cancelled() -> bool:
    """Whether somebody wants the present task to end, and not just a call that it reads: both raise CancelledError."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def raise_if_cancelled() -> None:
    """To be called behind what may lose a cancellation. redis-py sends by `asyncio.wait_for`, which before Python 3.12
    returns as if nothing were where the cancellation comes as the sending ends: a loop would go on for ever."""
    if is_cancelled():
        raise asyncio.CancelledError
