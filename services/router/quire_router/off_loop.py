"""Work that is too long for a callback of the event loop goes to a thread.

There is one thread: Python's threads share one interpreter, so more of them would not end sooner. They would only
compete with the loop, which would get the interpreter as one of many.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")
# Of values that are handled one by one: some 10 to 20 ms.
MOST_VALUES = 8192
_thread = ThreadPoolExecutor(1, thread_name_prefix="heavy")


async def off_loop(function: Callable[[], T], *, heavy: bool) -> T:
    """Call `function`, in the thread if `heavy`, where it waits for those before it. Return its result or raise its
    exception."""
    return await asyncio.get_running_loop().run_in_executor(_thread, function) if heavy else function()
