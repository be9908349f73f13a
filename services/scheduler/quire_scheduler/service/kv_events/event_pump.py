"""EventPump: publishes the changes of the named pages of each epoch.

The pump reads the bounded list of recent events that the watchers read too, as fast as the publisher takes batches. If
the pump falls behind the list, it sends consumers a clear of all pages, and then the pages that are held. When an epoch
ends, it sends a clear of all pages.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol

from quire_common.errors import ConfigError, FailedPrecondition
from quire_common.identity.exposure import require_near, require_private
from quire_common.telemetry.logs import get_logger
from quire_scheduler import metrics
from quire_scheduler.service.kv_events.events_config import parse_kv_events_config

if TYPE_CHECKING:
    from quire_scheduler.config import SchedulerConfig
    from quire_scheduler.core.scheduler import Scheduler
    from quire_scheduler.service.engine import Engine
    from quire_scheduler.service.kv_events.event_wire import EventWire

log = get_logger(__name__)
_OPTION = "kv_events_config"
_FULL_PAUSE_S = 0.01
_BATCH_EVENTS = 256


class Publisher(Protocol):
    """The receiver of batches of events."""

    def publish(self, payload: bytes) -> bool:
        """Take a batch. Returns False if the publisher has no room now."""
        ...

    def close(self) -> None:
        """Send the batches that were taken, and end."""


class EventPump:
    """The event pump of one scheduler, in its event loop."""

    def __init__(self, engine: Engine, publisher: Publisher, make_wire: type[EventWire]) -> None:
        self._engine = engine
        self._publisher = publisher
        self._make_wire = make_wire
        self._at = 0

    async def run(self) -> None:
        """Publish the changes of each epoch's named pages, until cancelled. When an epoch ends, consumers are told that
        nothing is held."""
        core: Scheduler | None = None
        wire: EventWire | None = None
        while True:
            if self._engine.core is not core:
                if wire is not None:
                    await self._send(wire.cleared())
                core, wire, self._at = self._engine.core, None, 0
                if core is not None:
                    pages = core.hello.model.pages
                    wire = self._make_wire(pages.page_size, len(pages.groups))
                continue
            if core is None or wire is None or not await self._follow(core, wire):
                await self._engine.pages_changed.wait()

    def close(self) -> None:
        """Close the publisher. Called after `run` has ended."""
        self._publisher.close()

    async def _follow(self, core: Scheduler, wire: EventWire) -> bool:
        """Publish the events since the last call, in batches of at most 256. If some are no longer in the list, log and
        count that, publish that all pages are cleared, and then a snapshot. Returns False if there was nothing new."""
        try:
            events = core.names.events_after(self._at)
        except FailedPrecondition:
            log.warning("KV events fell behind", at=self._at, now=core.names.sequence)
            metrics.kv_event_resyncs.inc()
            self._at = core.names.sequence
            await self._send(wire.cleared())
            for piece in core.names.snapshot():
                await self._send(wire.snapshot(piece))
                # Let other tasks run: nobody waits for the whole snapshot.
                await asyncio.sleep(0)
            return True
        for start in range(0, len(events), _BATCH_EVENTS):
            batch = events[start : start + _BATCH_EVENTS]
            await self._send(wire.changes(batch))
            self._at = batch[-1].sequence
        return bool(events)

    async def _send(self, payload: bytes) -> None:
        """Publish a batch, and wait while the publisher takes none."""
        while not self._publisher.publish(payload):
            await asyncio.sleep(_FULL_PAUSE_S)
        metrics.kv_event_batches.inc()


def make_event_pump(options: SchedulerConfig, engine: Engine) -> EventPump | None:
    """Make the event pump that --kv-events-config asks for, and open its sockets; None if it asks for none. Raises
    ConfigError for a bad option, a TCP endpoint that is not allowed without encryption, an endpoint that cannot be
    used, or a missing package. If prefix caching is off, a warning is logged, since there will be no events."""
    config = parse_kv_events_config(options.kv_events_config)
    if not config.enabled:
        return None
    # ZeroMQ has no TLS here, and vLLM's consumers have no keys, so neither side could tell who the other is.
    for host in config.listens_on:
        require_private(options, host, _OPTION, secured=False, fix="Publish through a proxy that has TLS")
    for host in config.connects_to:
        require_near(options, host, _OPTION)
    try:
        # These packages are an optional extra of the distribution, since most schedulers do not need them.
        from quire_scheduler.service.kv_events.event_wire import EventWire
        from quire_scheduler.service.kv_events.zmq_publisher import ZmqPublisher
    except ImportError as error:
        raise ConfigError(
            "MISSING_PACKAGE",
            f"--kv-events-config needs a package that is not installed: {error.name}.",
            "Install quire-scheduler[kv-events], or leave the option out.",
            param=_OPTION,
        ) from None
    if not engine.config.enable_prefix_caching:
        log.warning("KV events say nothing, since prefix caching is off")
    publisher = ZmqPublisher(config)
    log.info("kv events", endpoint=publisher.endpoint, replay=publisher.replay_endpoint, bound=config.binds)
    return EventPump(engine, publisher, EventWire)
