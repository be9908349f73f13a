"""Pages in a Redis that several kvstores may share: one value per page, with a time to live. Every failure is a miss.

    quire:page: | namespace (32) | H (32) | group (u32, little-endian)    ->    the framed page

Commands travel in pipelines, on a connection of each thread's own. A Redis that is away, or slower than `timeout_s`,
is left alone for `retry_s` and then greeted by the thread that tends the tier, so that no lookup ever waits for one
that is known to be bad. A page lives for `ttl_s` since it was last put or read.
"""

from __future__ import annotations

import contextlib
import struct
import threading
from collections import deque
from typing import TYPE_CHECKING

from quire_common.pages import HEADER_BYTES
from quire_common.telemetry.logs import get_logger
from quire_kvstore.tiers.circuit_breaker import CircuitBreaker
from quire_kvstore.tiers.medium import TierCounts
from quire_kvstore.tiers.redis_address import RedisAddress
from quire_kvstore.tiers.redis_wire import RedisLost, RedisWire, Refusal

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from quire_common.pages import PageKey
    from quire_kvstore.tiers.medium import Came, Deliver, Gone, PageJob, Place
    from quire_kvstore.tiers.redis_wire import Answer, Word

log = get_logger(__name__)
PREFIX = b"quire:page:"
# Values that are asked for and have not come: what Redis keeps in memory for one reader.
AHEAD_BYTES = 8 << 20
_GROUP = struct.Struct("<I")
_COMMANDS_PER_LENGTH = 2


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
        self.came: Came = lambda: None
        self._address = RedisAddress.parse(url)
        self._ttl = b"%d" % ttl_s
        self._timeout_s = timeout_s
        self._max_value_bytes = HEADER_BYTES + max_page_bytes
        self._breaker = CircuitBreaker(retry_s, is_open=True)
        self._local = threading.local()
        self._lock = threading.Lock()
        self._wires: set[RedisWire] = set()
        self._doomed: deque[PageKey] = deque()
        # Connections of before the last outage are not tried.
        self._life = 0

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

    def refresh(self, keys: Iterable[PageKey]) -> None:
        """See Medium: and of order."""

    def open(self) -> None:
        """See Medium: the thread that tends it connects."""

    def tend(self) -> None:
        """See Medium: the probe of the half-open breaker, and what was left to be deleted while it was open."""
        if self._breaker.closed and self._doomed:
            self._delete_doomed()
        if self._breaker.closed or not self._breaker.allow():
            return
        try:
            self._life += 1
            self._wire()  # a new connection greets
        except RedisLost as error:
            self._failed(error)
        else:
            self._breaker.succeeded()
            log.info("redis answers", redis=str(self._address))

    def read(self, jobs: Sequence[PageJob], place: Place, deliver: Deliver) -> None:
        """See Medium. Lengths first: what is not there ends its prefix before the pages after it are fetched."""
        told = self._ask([command for job in jobs for command in self._length_of(job)])
        found: list[tuple[PageJob, int]] = []
        for job, size in zip(jobs, told[::_COMMANDS_PER_LENGTH], strict=True):
            if isinstance(size, int) and 0 < size <= self._max_value_bytes:
                found.append((job, size))
                continue
            if size:  # too long, or no string at all
                self.counts.add(corrupt=1)
                self.discard(job.key)
            deliver(job, None)
        if found:
            self._fetch(found, place, deliver)
        self._delete_doomed()

    def write(self, pages: Sequence[tuple[PageJob, memoryview]]) -> int:
        """See Medium. What is there already, from whomever, lives on for another time."""
        there = self._ask([(b"EXPIRE", redis_key(job.key), self._ttl) for job, _ in pages])
        kept = there.count(1)
        missing = [page for page, answer in zip(pages, there, strict=True) if answer == 0]
        answers = self._ask([(b"SET", redis_key(job.key), framed, b"EX", self._ttl) for job, framed in missing])
        stored = [len(framed) for (_, framed), answer in zip(missing, answers, strict=True) if answer == b"OK"]
        self.counts.add(stored=len(stored), bytes_written=sum(stored))
        return kept + len(stored)

    def discard(self, key: PageKey) -> None:
        """See Medium. Not at once: answers to what was asked before may be under way."""
        self._doomed.append(key)

    def close(self) -> None:
        """See Medium."""
        with self._lock:
            for wire in self._wires:
                wire.close()
            self._wires.clear()

    def check_integrity(self) -> None:
        """No thread has more than one connection."""
        assert len(self._wires) <= threading.active_count()

    def _delete_doomed(self) -> None:
        keys: list[Word] = []
        with contextlib.suppress(IndexError):  # other threads take some too
            while True:
                keys.append(redis_key(self._doomed.popleft()))
        if keys:
            self._ask([(b"DEL", *keys)])

    def _length_of(self, job: PageJob) -> tuple[tuple[Word, ...], tuple[Word, ...]]:
        """_COMMANDS_PER_LENGTH commands: its length, and another life, since it is about to be read."""
        key = redis_key(job.key)
        return (b"STRLEN", key), (b"EXPIRE", key, self._ttl)

    def _fetch(self, found: Iterable[tuple[PageJob, int]], place: Place, deliver: Deliver) -> None:
        """Values of these sizes into their places. So much is asked for ahead that Redis never waits for us."""
        to_ask, asked_bytes = deque(found), 0
        asked: deque[tuple[PageJob, memoryview]] = deque()
        try:
            wire = self._wire()
            while to_ask or asked:
                commands: list[Sequence[Word]] = []
                while to_ask and (not asked or asked_bytes + to_ask[0][1] <= AHEAD_BYTES):
                    job, size = to_ask.popleft()
                    if (view := place(job, size)) is not None:
                        asked.append((job, view))
                        asked_bytes += size
                        commands.append((b"GET", redis_key(job.key)))
                if commands:
                    wire.send(commands)
                if asked:
                    job, view = asked[0]
                    size = len(view)
                    answer = wire.answer(view)
                    asked.popleft()
                    asked_bytes -= size
                    self._count_refusals([answer])
                    came = view if answer == size else view[:0]
                    deliver(job, came if isinstance(answer, int) else None)
        except RedisLost as error:
            self._failed(error)
            for job, _ in (*asked, *to_ask):
                deliver(job, None)
        except BaseException:
            self._hang_up()  # answers that nobody read would be taken for the next ones
            raise

    def _ask(self, commands: Sequence[Sequence[Word]]) -> list[Answer]:
        """The answers, errors of single commands among them; None for all where Redis is away."""
        if not commands or not self._breaker.closed:
            return [None] * len(commands)
        try:
            answers = self._wire().ask(commands)
        except RedisLost as error:
            self._failed(error)
            return [None] * len(commands)
        self._count_refusals(answers)
        return answers

    def _count_refusals(self, answers: Sequence[Answer]) -> None:
        refusals = [answer for answer in answers if isinstance(answer, Refusal)]
        if refusals:
            self.counts.add(errors=len(refusals))
            log.warning("redis refuses", redis=str(self._address), reason=str(refusals[0]), count=len(refusals))

    def _wire(self) -> RedisWire:
        """The calling thread's connection; raises RedisLost."""
        wire: RedisWire | None = getattr(self._local, "wire", None)
        if wire is None or self._local.life != self._life:
            self._hang_up()
            self._local.life = self._life
            wire = self._local.wire = RedisWire(self._address, self._timeout_s)
            with self._lock:
                self._wires.add(wire)
        return wire

    def _hang_up(self) -> None:
        """Close the calling thread's connection, if it has one."""
        wire: RedisWire | None = getattr(self._local, "wire", None)
        if wire is not None:
            self._local.wire = None
            with self._lock:
                self._wires.discard(wire)
            wire.close()

    def _failed(self, error: Exception) -> None:
        self._hang_up()
        self.counts.add(errors=1)
        if self._breaker.failed():
            log.warning("redis is away, its pages are misses", redis=str(self._address), reason=str(error))
