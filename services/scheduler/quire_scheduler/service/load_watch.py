"""WatchLoad: tells watchers how busy the replica is: at once when its phase, progress, detail or role changes,
else at most once per interval."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from quire.v1 import scheduler_pb2
from quire_common.columns import saturated_u32
from quire_common.credit.hello import epoch_to_pb
from quire_common.identity.expiry import first_expiry
from quire_common.version import installed_version

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from quire_scheduler.service.engine import Engine

_LEAST_INTERVAL_MS = 10
_MOST_INTERVAL_MS = 60_000
# A watcher gets a message at least this often, so that it can tell an idle replica from a dead one.
_HEARTBEAT_S = 2.0
_VERSION = installed_version("quire-scheduler")
# The names of 32-bit fields. A count may be larger: 5,000 waiting prompts of a million tokens each exceed 32 bits.
_COUNTS = {field.name for field in scheduler_pb2.Load.DESCRIPTOR.fields if field.type == field.TYPE_UINT32}


async def watch_load(engine: Engine, instance: str, interval_ms: int) -> AsyncIterator[scheduler_pb2.Load]:
    """Yield load messages to one watcher, for ever. The first comes at once. Then one comes at once when the phase, its
    progress, its detail or the role changes (or as soon as the watcher has taken the message before), and at the end of
    each interval in which the load has changed. If it has not, one comes as a heartbeat at the first end of an interval
    that is 2 s or more after the last message. `interval_ms` is kept within 10 ms and 60 s; 0 means the configured
    one."""
    wanted = interval_ms or engine.config.load_interval_ms
    interval_s = min(max(wanted, _LEAST_INTERVAL_MS), _MOST_INTERVAL_MS) / 1000
    loop = asyncio.get_running_loop()
    last, sent_at = None, 0.0
    while True:
        changes, load = engine.phase_changed.sets, load_to_pb(engine, instance)
        if load != last or loop.time() - sent_at >= _HEARTBEAT_S:
            last, sent_at = load, loop.time()
            yield load
        if engine.phase_changed.sets == changes:  # none came while the watcher was slow to read
            await engine.phase_changed.wait(interval_s)


def load_to_pb(engine: Engine, instance: str) -> scheduler_pb2.Load:
    """Build the message of the present load. Without a worker, the message lacks the epoch and the figures of
    `core.load()`. It always has the phase with its progress and detail, the role, the longest wait, the version and the
    certificate's expiry. The detail is cut to 500 characters, and a count too large for its 32-bit field becomes the
    field's maximum."""
    load = scheduler_pb2.Load(
        instance=instance,
        phase=engine.phase,
        progress=engine.progress,
        detail=engine.detail[:500],
        role=engine.roles.role,
        oldest_wait_ms=saturated_u32(round(engine.oldest_wait_s * 1000)),
        version=_VERSION,
        certificate_expiry_unix_s=int(first_expiry()),
    )
    if engine.core is not None:
        figures = engine.core.load()
        load.epoch.CopyFrom(epoch_to_pb(engine.core.hello.epoch))
        for name, value in figures._asdict().items():
            setattr(load, name, saturated_u32(value) if name in _COUNTS else value)
    return load
