"""Who runs next: queue policies by name. Adding one is a file and a line here."""

from __future__ import annotations

from collections.abc import Callable

from quire_scheduler.core.queue_policy.base import QueuePolicy
from quire_scheduler.core.queue_policy.fair import FairQueue
from quire_scheduler.core.queue_policy.ordered import OrderedQueue, one_level, priority_level

POLICIES: dict[str, Callable[[], QueuePolicy]] = {
    "fcfs": lambda: OrderedQueue(one_level),
    "priority": lambda: OrderedQueue(priority_level),
    "fair": FairQueue,
}

__all__ = ["POLICIES", "FairQueue", "OrderedQueue", "QueuePolicy"]
