"""Queue policies by name: they decide which waiting request is next. A new policy is one file and one line here."""

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
