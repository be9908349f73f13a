"""The table of faults: what may befall a stack, how long it lasts, and how often a run of the table makes it happen."""

from __future__ import annotations

import signal
from dataclasses import dataclass

from tests.chaos.table.events import (
    ClockStep,
    Edge,
    Event,
    FullDisk,
    Kill,
    LostClients,
    MemoryLimit,
    RedisFault,
    SpoiltPages,
    Stop,
)
from tests.chaos.table.table_rig import EVERY_SERVICE, REDIS

_SOON, _SHORT, _LONG = (0.4, 0.8), (1.0, 1.8), (3.5, 4.2)
_HOUR_S = 3600


@dataclass(frozen=True)
class Row:
    """`seconds`: how long streams go on under the fault, from the least to the most. `times`: rounds in a whole run.

    `routers_end`: a router ends, and its HTTP streams with it. `detected`: streams that were being answered go on
    within the bound, since another one takes over; False where nothing is to be taken over, or the router itself stops.
    """

    name: str
    event: Event
    seconds: tuple[float, float]
    times: int
    routers_end: bool = False
    detected: bool = True


KILLS = (
    Row("worker killed", Kill("worker"), _SHORT, 12),
    Row("scheduler killed", Kill("scheduler"), _SHORT, 12),
    Row("tokenizer killed", Kill("tokenizer"), _SHORT, 10),
    Row("kvstore killed", Kill("kvstore"), _SHORT, 6),
    Row("router killed", Kill("router"), _SHORT, 8, routers_end=True),
    Row("router drained", Kill("router", signal.SIGTERM), _SHORT, 6),
)
STOPS = (
    Row("worker stopped", Stop("worker"), _LONG, 6),
    Row("scheduler stopped", Stop("scheduler"), _LONG, 6),
    Row("tokenizer stopped", Stop("tokenizer"), _LONG, 6),
    Row("kvstore stopped", Stop("kvstore"), _LONG, 4),
    Row("router stopped", Stop("router"), _SHORT, 6, detected=False),
)
# Callers and callees, and how often a partition parts them.
_EDGES = (
    ("router", "scheduler", 5),
    ("router", "tokenizer", 5),
    ("router", "kvstore", 3),
    ("scheduler", "worker", 5),
    ("scheduler", "kvstore", 3),
    ("worker", "kvstore", 3),
    ("kvstore", REDIS, 3),
    (EVERY_SERVICE, REDIS, 3),
)
PARTITIONS = tuple(
    Row(f"{caller} and {callee} parted", Edge(caller, callee, "held"), _LONG, times) for caller, callee, times in _EDGES
)
BROKEN_LINKS = tuple(
    Row(f"connections of {caller} and {callee} broken", Edge(caller, callee, "cut"), _SOON, 2)
    for caller, callee, _ in _EDGES
)
SLOW_LINKS = tuple(
    Row(f"slow link from {callee} to {caller}", Edge(caller, callee, "slow"), _SHORT, 2, detected=False)
    for caller, callee, _ in _EDGES
)
RESOURCES = (
    Row("kvstore's disk full", FullDisk(), _SHORT, 4, detected=False),
    Row("worker at its memory limit", MemoryLimit("worker"), _SHORT, 3),
    Row("scheduler at its memory limit", MemoryLimit("scheduler"), _SHORT, 3),
    Row("tokenizer at its memory limit", MemoryLimit("tokenizer"), _SHORT, 3),
    Row("kvstore at its memory limit", MemoryLimit("kvstore"), _SHORT, 3),
    Row("router at its memory limit", MemoryLimit("router"), _SHORT, 2, routers_end=True),
)
CLOCKS = tuple(
    Row(f"{service}'s clock an hour {direction}", ClockStep(service, step), _SHORT, 1, detected=False)
    for service in ("router", "tokenizer", "scheduler", "worker", "kvstore")
    for direction, step in (("ahead", _HOUR_S), ("behind", -_HOUR_S))
)
CACHES = (
    Row("Redis killed", RedisFault("killed"), _SHORT, 4, detected=False),
    Row("Redis stopped", RedisFault("hung"), _SHORT, 4, detected=False),
    Row("Redis emptied", RedisFault("emptied"), _SOON, 4, detected=False),
    Row("pages in memory spoilt", SpoiltPages("memory"), _SOON, 5, detected=False),
    Row("pages on disk spoilt", SpoiltPages("disk"), _SOON, 4, detected=False),
    Row("pages in Redis spoilt", SpoiltPages("redis"), _SOON, 4, detected=False),
)
CLIENTS = (
    Row("clients vanish", LostClients(half_open=False), _SOON, 4, detected=False),
    Row("clients' connections half open", LostClients(half_open=True), _SOON, 4, detected=False),
)
GROUPS: dict[str, tuple[Row, ...]] = {
    "processes end": KILLS,
    "processes stop for some seconds": STOPS,
    "no byte passes between two services": PARTITIONS,
    "a link between two services is slow": SLOW_LINKS,
    "connections between two services break": BROKEN_LINKS,
    "disk and memory run out": RESOURCES,
    "clocks step": CLOCKS,
    "caches are lost or damaged": CACHES,
    "clients are lost": CLIENTS,
}
ROWS = tuple(row for group in GROUPS.values() for row in group)
