"""Tells whether the present task is being cancelled. CancelledError does not tell this by itself, and some libraries
swallow it."""

from __future__ import annotations

import asyncio


def is_cancelled() -> bool:
    """Whether the present task itself was cancelled. CancelledError may also come from a gRPC call that the task
    reads."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def raise_if_cancelled() -> None:
    """Raise CancelledError if the present task was cancelled. Call this after a library call that may swallow a
    cancellation. For example, redis-py sends with `asyncio.wait_for`. Before Python 3.12, `wait_for` returns normally
    if the cancellation comes at the moment at which the send ends. Without this check, a loop would then go on for
    ever."""
    if is_cancelled():
        raise asyncio.CancelledError
