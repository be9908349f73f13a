"""The deadline of a request. A Generation has a timer of its own; `within_deadline` bounds the work before that timer
starts, such as tokenizing."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING

from quire_common.errors import DeadlineExceeded

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from quire_router.sequences.job import Caller

# The timeout of a call whose deadline has passed, since 0 would be none.
_EXPIRED_S = 0.001


def time_left_s(caller: Caller, arrived_ns: int) -> float | None:
    """Return how many seconds a request that arrived at `arrived_ns` has left. The result is negative after the
    deadline, and None if the caller has no timeout."""
    return caller.timeout_s - (time.monotonic_ns() - arrived_ns) / 1e9 if caller.timeout_s > 0 else None


def shortest_timeout_s(remaining_s: float | None, *limits_s: float) -> float:
    """Return the shortest of a call's remaining time (None: the call has no deadline) and the limits, of which 0 is no
    limit. Returns 0 if there is none of them, and a tiny timeout for a call whose deadline has passed."""
    given = [limit_s for limit_s in limits_s if limit_s > 0]
    if remaining_s is not None:
        given.append(max(remaining_s, _EXPIRED_S))
    return min(given, default=0.0)


def request_timeout(timeout_s: float) -> DeadlineExceeded:
    """Make the error of a request that has used up its time."""
    return DeadlineExceeded(
        "REQUEST_TIMEOUT",
        f"The request did not end within {timeout_s:g} s.",
        "Ask for fewer tokens, or raise --request-timeout-s.",
    )


@contextlib.asynccontextmanager
async def within_deadline(caller: Caller, arrived_ns: int) -> AsyncIterator[None]:
    """Cancel the `with` block at the request's deadline, and raise DeadlineExceeded then. Without a timeout of the
    caller, the block is not bounded."""
    timer = asyncio.timeout(time_left_s(caller, arrived_ns))
    try:
        async with timer:
            yield
    except TimeoutError:
        if not timer.expired():
            raise
        raise request_timeout(caller.timeout_s) from None
