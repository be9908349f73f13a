"""Peers from Redis: one key per instance with a time to live, renewed by heartbeats.

    quire:endpoint:{service}:{instance}   JSON {"address", "metadata"}, EX ttl
    quire:instances:{service}             set of instance names, so that nobody scans a Redis full of pages
    quire:life                            random value, set once: another one means that Redis lost its memory

A service goes on if Redis does not answer: it repeats its heartbeats, and its watchers keep the last list of peers.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from quire_common.cancellation import raise_if_cancelled
from quire_common.discovery.closing import Closing
from quire_common.discovery.endpoint import Endpoint
from quire_common.discovery.membership import Membership
from quire_common.discovery.redis_client import open_redis
from quire_common.errors import ConfigError
from quire_common.telemetry.logs import get_logger
from quire_common.telemetry.redis_state import note_redis

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

log = get_logger(__name__)
LIFE_KEY = "quire:life"
_TIMEOUT_S = 2.0
_MOST_S = 86_400.0
_FIRST_RETRY_S = 0.1
# Atomic, so that a watcher cannot forget an instance that has just come back.
_FORGET = "if redis.call('EXISTS', KEYS[1]) == 0 then return redis.call('SREM', KEYS[2], ARGV[1]) end return 0"
_FAILURES = (RedisError, OSError, TimeoutError)


@dataclass(frozen=True)
class RedisSettings:
    """`redis://[user:password@]host:port/db[?ttl_s=10&poll_s=1]`; rediss for TLS."""

    url: str
    url_file: str = ""
    ttl_s: float = 10.0
    poll_s: float = 1.0

    @classmethod
    def parse(cls, spec: str, spec_file: str = "") -> RedisSettings:
        """Parse the URL of --discovery; the options ttl_s and poll_s are taken out of the URL, and others stay in it,
        except those without a value. Raises ConfigError for a missing or bad host, a bad port, a ttl_s that is no
        number from 0.1 s to a day, or a poll_s that is none from 0.01 s to a day. The error shows no part of the user
        or the password."""
        host: str | None = None
        try:
            parts = urlsplit(spec)
            host, options = parts.hostname, dict(parse_qsl(parts.query))
            ttl_s, poll_s = float(options.pop("ttl_s", 10.0)), float(options.pop("poll_s", 1.0))
            valid = bool(host) and (parts.port or 6379) > 0 and "@" not in parts.path + parts.query + parts.fragment
            valid = valid and 0.1 <= ttl_s <= _MOST_S and 0.01 <= poll_s <= _MOST_S
        except ValueError:
            valid = False
        if not valid:
            # A "/" or "?" in a password ends the host too early: what comes before the last "@" is not shown.
            is_shown = host is not None and host in spec.rpartition("@")[2].lower()
            fault = f"at {host} has a bad port, ttl_s or poll_s" if is_shown else "has no valid host"
            raise ConfigError(
                "BAD_DISCOVERY",
                f"The Redis of discovery {fault}.",
                "Write redis://host:6379/0?ttl_s=10&poll_s=1.",
                param="discovery",
            )
        return cls(urlunsplit(parts._replace(query=urlencode(options))), spec_file, ttl_s, poll_s)


class RedisDiscovery:
    """Discovery by Redis keys (see the module). A dead instance is listed until its key expires (`settings.ttl_s`) and
    the next poll comes, and longer after an outage of Redis or a loss of its memory."""

    def __init__(self, settings: RedisSettings) -> None:
        self._settings = settings
        self._where = urlsplit(settings.url).hostname
        self._closing = Closing()
        self._heartbeats: dict[str, tuple[Endpoint, asyncio.Task[None]]] = {}
        self._redis = open_redis(
            settings.url,
            settings.url_file,
            decode_responses=True,
            encoding_errors="replace",  # a value that is not UTF-8 must not hide the other values
            socket_timeout=_TIMEOUT_S,
            socket_connect_timeout=_TIMEOUT_S,
            retry=Retry(NoBackoff(), 0),
        )

    async def watch(self, service: str) -> AsyncIterator[list[Endpoint]]:
        """Poll Redis every `poll_s`, and yield the service's instances at first and at every change, until `close`.
        While Redis is away, the last list stays (an empty one, if there was none), and Redis is tried after pauses that
        double from 0.1 s up to `poll_s`, if that is longer. After an outage, and after a loss of Redis's memory,
        missing instances are kept for `ttl_s`. The beginning and the end of an outage are logged, and a metric shows
        whether Redis answers."""
        membership = Membership(self._settings.ttl_s)
        backoff = _Backoff(max(self._settings.poll_s, _FIRST_RETRY_S))
        while not self._closing.done:
            try:
                found, life = await self._read(service)
            except _FAILURES as error:
                raise_if_cancelled()
                if self._closing.done:
                    return
                membership.outage()
                note_redis("discovery", answered=False)
                if backoff.failures == 0:
                    log.warning("redis is away, peers stay as known", redis=self._where, reason=str(error))
                pause_s = backoff.next_s()
            else:
                raise_if_cancelled()
                if backoff.failures:
                    log.info("redis is back", redis=self._where)
                backoff.reset()
                note_redis("discovery", answered=True)
                membership.update(found, life, time.monotonic())
                pause_s = self._settings.poll_s
            news = membership.members_if_changed()
            if news is not None:
                yield news
            await self._closing.pause(pause_s)

    async def register(self, endpoint: Endpoint) -> None:
        """Write the endpoint's key once, then keep it alive by heartbeats every third of `ttl_s`, in a task. An earlier
        endpoint of the same service and instance is replaced. If Redis is away, this does not raise: the heartbeats go
        on trying."""
        before = self._heartbeats.pop(_key(endpoint), None)
        if before is not None:
            await _cancel(before[1])
        backoff = _Backoff(self._settings.ttl_s / 3)
        await self._send_heartbeat(endpoint, backoff)
        task = asyncio.create_task(self._keep_alive(endpoint, backoff), name=f"heartbeat {endpoint.instance}")
        self._heartbeats[_key(endpoint)] = (endpoint, task)

    async def close(self) -> None:
        """End the watchers and the heartbeats, delete the keys and index entries of registered endpoints, so that
        peers need not wait for the time to live, and close the client. A deletion that fails, or takes more than 2 s
        for one endpoint, is given up silently."""
        self._closing.set()
        beats, self._heartbeats = list(self._heartbeats.values()), {}
        for endpoint, task in beats:
            await _cancel(task)
            with contextlib.suppress(*_FAILURES):
                async with asyncio.timeout(_TIMEOUT_S):
                    await self._redis.delete(_key(endpoint))
                    await self._redis.srem(_index(endpoint.service), endpoint.instance)
        await self._redis.aclose()

    async def _read(self, service: str) -> tuple[dict[str, Endpoint], str | None]:
        """Return the service's instances by name, and the value that changes when Redis loses its memory (None if not
        set). Instances whose key has expired are removed from the index. Unreadable instances are logged and skipped.
        Raises RedisError, OSError or TimeoutError if Redis fails."""
        instances = sorted(await self._redis.smembers(_index(service)))
        keys = [f"quire:endpoint:{service}:{instance}" for instance in instances]
        life, *values = await self._redis.mget([LIFE_KEY, *keys])
        found: dict[str, Endpoint] = {}
        for instance, key, value in zip(instances, keys, values, strict=True):
            if value is None:
                await self._redis.eval(_FORGET, 2, key, _index(service), instance)
                continue
            try:
                fields = json.loads(value)
                metadata = {str(k): str(v) for k, v in fields["metadata"].items()}
                found[instance] = Endpoint(instance, service, str(fields["address"]), metadata)
            except (ValueError, KeyError, TypeError, AttributeError):
                log.warning("an endpoint in redis is unreadable", service_name=service, name=instance)
        return found, life

    async def _keep_alive(self, endpoint: Endpoint, backoff: _Backoff) -> None:
        """Write the endpoint again every third of `ttl_s`, or after a growing pause while Redis fails, until
        `close`."""
        while not await self._closing.pause(backoff.next_s() if backoff.failures else self._settings.ttl_s / 3):
            await self._send_heartbeat(endpoint, backoff)
            raise_if_cancelled()

    async def _send_heartbeat(self, endpoint: Endpoint, backoff: _Backoff) -> None:
        """Write the endpoint's key with its time to live, add the instance to the index, and set the `life` key if
        there is none. A failure is not raised: the first one in a row is logged and begins the growing pauses of
        `backoff`, which a success ends. The metric of Redis's answers is set."""
        value = json.dumps({"address": endpoint.address, "metadata": dict(endpoint.metadata)})
        try:
            async with self._redis.pipeline(transaction=True) as pipe:
                pipe.set(_key(endpoint), value, px=int(self._settings.ttl_s * 1000))
                pipe.sadd(_index(endpoint.service), endpoint.instance)
                pipe.set(LIFE_KEY, uuid.uuid4().hex, nx=True)
                await pipe.execute()
        except _FAILURES as error:
            if backoff.failures == 0:
                log.warning("cannot register in redis, trying on", redis=self._where, reason=str(error))
                backoff.next_s()
            note_redis("discovery", answered=False)
        else:
            backoff.reset()
            note_redis("discovery", answered=True)


class _Backoff:
    """Doubling pauses up to a bound."""

    def __init__(self, most_s: float) -> None:
        self._most_s = most_s
        self.failures = 0

    def next_s(self) -> float:
        self.failures += 1
        return min(self._most_s, _FIRST_RETRY_S * 2.0 ** min(self.failures - 1, 16))

    def reset(self) -> None:
        self.failures = 0


def _key(endpoint: Endpoint) -> str:
    return f"quire:endpoint:{endpoint.service}:{endpoint.instance}"


def _index(service: str) -> str:
    return f"quire:instances:{service}"


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait([task])
