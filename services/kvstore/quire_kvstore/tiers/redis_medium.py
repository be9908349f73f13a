"""Pages in a Redis that several kvstores may share: one value per page, with a time to live. Every failure is a miss.

    quire:page: | namespace (32) | H (32) | group (u32, little-endian)    ->    the framed page

Commands travel in pipelines. A Redis that is away, or slower than `timeout_s`, is left alone for `retry_s` and then
greeted by the thread that tends the tier, so that no lookup ever waits for one that is known to be bad.
"""

from __future__ import annotations

import struct
import time
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import RedisError, ResponseError
from redis.retry import Retry

from quire_common.errors import ConfigError
from quire_common.pages import HEADER_BYTES
from quire_common.telemetry.logs import get_logger
from quire_kvstore.tiers.circuit_breaker import CircuitBreaker
from quire_kvstore.tiers.medium import TierCounts

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from quire_common.pages import PageKey
    from quire_kvstore.tiers.medium import Deliver, Gone, PageJob, StillWanted

log = get_logger(__name__)
PREFIX = b"quire:page:"
# Bodies of one pipeline: what a reader holds in memory at once.
PIPELINE_BYTES = 8 << 20
_SOCKET_READ_BYTES = 1 << 20
_GROUP = struct.Struct("<I")
_FAILURES = (RedisError, OSError)


def redis_key(key: PageKey) -> bytes:
    """Where a page is."""
    return PREFIX + key.namespace + key.hash + _GROUP.pack(key.group)


class RedisMedium:
    """See Medium."""

    name = "redis"
    local = False
    read_batch = 64
    write_batch = 16
    pages = 0
    used_bytes = 0
    capacity_bytes = 0

    def __init__(self, url: str, ttl_s: int, timeout_s: float, retry_s: float, max_page_bytes: int) -> None:
        self.counts = TierCounts()
        self.gone: Gone = lambda keys: None
        self._ttl_s = ttl_s
        self._timeout_s = timeout_s
        self._max_value_bytes = HEADER_BYTES + max_page_bytes
        self._breaker = CircuitBreaker(retry_s, is_open=True)
        try:
            self._where = urlsplit(url).hostname or "?"
            self._redis: Any = Redis.from_url(  # untyped in part
                url,
                socket_timeout=timeout_s,
                socket_connect_timeout=timeout_s,
                socket_read_size=_SOCKET_READ_BYTES,
                retry=Retry(NoBackoff(), 0),
                protocol=2,
            )
        except ValueError as error:
            raise ConfigError(
                "BAD_REDIS_URL", f"redis_url is no URL of a Redis: {error}.", "Write redis://host:6379/0."
            ) from error

    @property
    def available(self) -> bool:
        """See Medium."""
        return self._breaker.closed

    def held_keys(self) -> list[PageKey]:
        """See Medium: nobody asks a Redis full of pages for all of them."""
        return []

    def may_have(self, key: PageKey) -> bool:
        """See Medium: only Redis itself knows, unless it is away."""
        return self._breaker.closed

    def touch(self, keys: Iterable[PageKey]) -> None:
        """See Medium: Redis has its own idea of age."""

    def open(self) -> None:
        """See Medium: the thread that tends it connects."""

    def tend(self) -> None:
        """See Medium: the probe of the half-open breaker."""
        if self._breaker.closed or not self._breaker.allow():
            return
        try:
            self._redis.ping()
        except _FAILURES as error:
            self._failed(error)
        else:
            self._breaker.succeeded()
            log.info("redis answers", redis=self._where)

    def read(self, jobs: Sequence[PageJob], wanted: StillWanted, deliver: Deliver) -> None:
        """See Medium. Lengths first: what is not there ends its prefix before the pages after it are fetched."""
        sizes = self._run([("STRLEN", redis_key(job.key)) for job in jobs])
        found: list[tuple[PageJob, int]] = []
        for job, size in zip(jobs, sizes, strict=True):
            if isinstance(size, int) and 0 < size <= self._max_value_bytes:
                found.append((job, size))
                continue
            if size:  # too long, or an error: no string at all
                self.counts.add(corrupt=1)
                self.discard(job.key)
            deliver(job, None)
        while found:
            batch: list[PageJob] = []
            batch_bytes = 0
            while found and (not batch or batch_bytes + found[0][1] <= PIPELINE_BYTES):
                job, size = found.pop(0)
                if wanted(job):
                    batch.append(job)
                    batch_bytes += size
            for job, value in zip(batch, self._run([("GET", redis_key(job.key)) for job in batch]), strict=True):
                deliver(job, memoryview(value) if isinstance(value, bytes) else None)

    def write(self, pages: Sequence[tuple[PageJob, memoryview]]) -> int:
        """See Medium. What is there already, from whomever, lives on for another time."""
        there = self._run([("EXPIRE", redis_key(job.key), self._ttl_s) for job, _ in pages])
        kept = len([answer for answer in there if answer == 1])
        missing = [page for page, answer in zip(pages, there, strict=True) if answer == 0]
        while missing:
            batch: list[tuple[PageJob, memoryview]] = []
            batch_bytes = 0
            while missing and (not batch or batch_bytes + len(missing[0][1]) <= PIPELINE_BYTES):
                batch.append(missing.pop(0))
                batch_bytes += len(batch[-1][1])
            answers = self._run([("SET", redis_key(job.key), framed, "EX", self._ttl_s) for job, framed in batch])
            stored = [len(framed) for (_, framed), answer in zip(batch, answers, strict=True) if answer is True]
            kept += len(stored)
            self.counts.add(stored=len(stored), bytes_written=sum(stored))
        return kept

    def discard(self, key: PageKey) -> None:
        """See Medium."""
        self._run([("DEL", redis_key(key))])

    def close(self) -> None:
        """See Medium."""
        self._redis.close()

    def check_integrity(self) -> None:
        """It has no state of its own."""

    def _run(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        """The answers, errors of single commands among them; None for all where Redis is away."""
        if not commands:
            return []
        if not self._breaker.closed:
            return [None] * len(commands)
        started = time.monotonic()
        try:
            with self._redis.pipeline(transaction=False) as pipeline:
                for command in commands:
                    pipeline.execute_command(*command)
                answers: list[Any] = pipeline.execute(raise_on_error=False)
        except _FAILURES as error:
            self._failed(error)
            return [None] * len(commands)
        took_s = time.monotonic() - started
        if took_s > self._timeout_s:
            self._failed(TimeoutError(f"it took {took_s:.3f} s to answer"))
        refusals = [answer for answer in answers if isinstance(answer, ResponseError)]
        if refusals:
            self.counts.add(errors=len(refusals))
            log.warning("redis refuses", redis=self._where, reason=str(refusals[0]), count=len(refusals))
        return answers

    def _failed(self, error: Exception) -> None:
        self.counts.add(errors=1)
        if self._breaker.failed():
            log.warning("redis is away, its pages are misses", redis=self._where, reason=str(error))
