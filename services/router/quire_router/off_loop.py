"""Work that is too long for a callback of the event loop goes to a thread; Python's threads take turns every 5 ms."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")
# Of values that are handled one by one: some 10 to 20 ms.
MOST_VALUES = 8192


async def off_loop(function: Callable[[], T], *, heavy: bool) -> T:
    """Call `function`, in a thread if `heavy`, and return its result or raise its exception."""
    return await asyncio.to_thread(function) if heavy else function()
