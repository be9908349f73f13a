"""Tasks of gRPC's that write a call's requests: each ends with its call, or it waits for good."""

from __future__ import annotations

import asyncio


def call_writers() -> int:
    """How many there are in this loop."""
    return sum("_consume_request_iterator" in repr(task.get_coro()) for task in asyncio.all_tasks())
