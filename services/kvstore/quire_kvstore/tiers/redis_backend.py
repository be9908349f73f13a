"""Pages in a Redis that several kvstores may share: one value per page, with a time to live. Every failure is a miss.

    quire:page: | namespace (32) | H (32) | group (u32, little-endian)    ->    the framed page

Each thread sends commands in pipelines, on its own connection. If Redis does not answer within `timeout_s`, it is not
used for `retry_s`. Then the thread that maintains the tier tries it again, so no lookup waits for a Redis that has
failed before. A page lives for `ttl_s` after it was last put or read.
"""

from __future__ import annotations

import contextlib
import struct
import threading
from collections import deque
from typing import TYPE_CHECKING

from quire_common.circuit_breaker import CircuitBreaker
from quire_common.errors import require
from quire_common.pages import HEADER_BYTES
from quire_common.telemetry.logs import get_logger
from quire_common.telemetry.redis_state import note_redis
from quire_kvstore.tiers.backend import TierCounts
from quire_kvstore.tiers.redis_connection import ErrorReply, RedisConnection, RedisConnectionLost

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from quire_common.pages import PageKey
    from quire_kvstore.tiers.backend import AllocateBuffer, Deliver, PageJob, PagesFound, PagesRemoved
    from quire_kvstore.tiers.redis_address import RedisAddress
    from quire_kvstore.tiers.redis_connection import Argument, Reply

log = get_logger(__name__)
PREFIX = b"quire:page:"
# Values that are asked for and have not come: what Redis keeps in memory for one reader.
READ_AHEAD_BYTES = 8 << 20
_GROUP = struct.Struct("<I")
_COMMANDS_PER_LENGTH = 2


def redis_key(key: PageKey) -> bytes:
    """Return the Redis key of a page."""
    return PREFIX + key.namespace + key.hash + _GROUP.pack(key.group)


class RedisBackend:
    """Implements TierBackend. Redis counts as away until `maintain` has reached it for the first time. `address` is
    called for each new connection."""

    name = "redis"
    local = False
    read_batch = 64
    write_batch = 16
    pages = 0
    used_bytes = 0
    capacity_bytes = 0

    def __init__(
        self, address: Callable[[], RedisAddress], ttl_s: int, timeout_s: float, retry_s: float, max_page_bytes: int
    ) -> None:
        self.counts = TierCounts()
        self._on_pages_removed: PagesRemoved = lambda keys: None
        self._on_pages_found: PagesFound = lambda: None
        self._address = address
        self._ttl = b"%d" % ttl_s
        self._timeout_s = timeout_s
        self._max_value_bytes = HEADER_BYTES + max_page_bytes
        self._breaker = CircuitBreaker(retry_s, retry_s, max_failures=1, is_open=True, name="redis_pages")
        self._local = threading.local()
        self._lock = threading.Lock()
        self._connections: set[RedisConnection] = set()
        self._pending_deletes: deque[PageKey] = deque()
        # Connections of before the last outage are not tried.
        self._generation = 0

    def call_back(self, on_pages_removed: PagesRemoved, on_pages_found: PagesFound) -> None:
        self._on_pages_removed, self._on_pages_found = on_pages_removed, on_pages_found

    @property
    def available(self) -> bool:
        return self._breaker.closed

    def held_keys(self) -> list[PageKey]:
        """Returns nothing: the backend does not list a Redis that may hold very many pages."""
        return []

    def may_have(self, key: PageKey) -> bool:
        """Returns True unless Redis counts as away: only Redis knows whether it has the page."""
        return self._breaker.closed

    def touch(self, keys: Iterable[PageKey]) -> None:
        """Does nothing: Redis keeps its own times of use."""

    def refresh(self, keys: Iterable[PageKey]) -> None:
        """Does nothing: Redis keeps its own order."""

    def open(self) -> None:
        """Does nothing: the tier's maintenance thread connects."""

    def maintain(self) -> None:
        """Send the deletes that wait, unless Redis counts as away. If it does and `retry_s` has passed, try to connect:
        on success Redis is used again, a failure is counted."""
        if self._breaker.closed and self._pending_deletes:
            self._flush_deletes()
        if self._breaker.closed or not self._breaker.try_now():
            return
        try:
            self._generation += 1
            self._connection()  # a new connection greets
        except RedisConnectionLost as error:
            self._on_lost(error)
        else:
            self._breaker.succeeded()
            note_redis("pages", answered=True)
            log.info("redis answers", redis=str(self._address()))

    def read(self, jobs: Sequence[PageJob], allocate_buffer: AllocateBuffer, deliver: Deliver) -> None:
        """Ask for the lengths of all values first, which also prolongs their lives. A page is delivered as None if it
        is missing, if Redis is away or answers with an error, or if it is longer than a page may be. A value that is
        too long, or no string, counts as corrupt and is deleted. Then fetch and deliver the others, and send
        the deletes."""
        lengths = self._execute([command for job in jobs for command in self._length_commands(job)])
        found: list[tuple[PageJob, int]] = []
        for job, size in zip(jobs, lengths[::_COMMANDS_PER_LENGTH], strict=True):
            if isinstance(size, int) and 0 < size <= self._max_value_bytes:
                found.append((job, size))
                continue
            if _is_no_page(size):
                self.counts.add(corrupt=1)
                self.discard(job.key)
            deliver(job, None)
        if found:
            self._fetch_values(found, allocate_buffer, deliver)
        self._flush_deletes()

    def write(self, pages: Sequence[tuple[PageJob, memoryview]]) -> int:
        """Write the pages that Redis does not have. Pages that it has already, from any kvstore, get a new time to
        live. Returns how many of `pages` Redis has afterwards, 0 if it is away."""
        there = self._execute([(b"EXPIRE", redis_key(job.key), self._ttl) for job, _ in pages])
        kept = there.count(1)
        missing = [page for page, answer in zip(pages, there, strict=True) if answer == 0]
        answers = self._execute([(b"SET", redis_key(job.key), framed, b"EX", self._ttl) for job, framed in missing])
        stored = [len(framed) for (_, framed), answer in zip(missing, answers, strict=True) if answer == b"OK"]
        self.counts.add(stored=len(stored), bytes_written=sum(stored))
        return kept + len(stored)

    def discard(self, key: PageKey) -> None:
        """Note a page to be deleted. Not at once: answers to what was asked before may be under way."""
        self._pending_deletes.append(key)

    def close(self) -> None:
        """Close the connections of all threads. The tier's threads have ended, so none is in use. The pages stay in
        Redis."""
        with self._lock:
            for connection in self._connections:
                connection.close()
            self._connections.clear()

    def check_integrity(self) -> None:
        """Raise AssertionError if there are more connections than threads in the process."""
        require(len(self._connections) <= threading.active_count(), "a thread has two connections")

    def _flush_deletes(self) -> None:
        """Delete in one command the pages that `discard` has noted. If Redis is away, these deletes are lost."""
        keys: list[Argument] = []
        with contextlib.suppress(IndexError):  # other threads take some too
            while True:
                keys.append(redis_key(self._pending_deletes.popleft()))
        if keys:
            self._execute([(b"DEL", *keys)])

    def _length_commands(self, job: PageJob) -> tuple[tuple[Argument, ...], tuple[Argument, ...]]:
        """Return the commands for a page that is about to be read: one asks the length of its value, one sets its time
        to live anew."""
        key = redis_key(job.key)
        return (b"STRLEN", key), (b"EXPIRE", key, self._ttl)

    def _fetch_values(
        self, found: Iterable[tuple[PageJob, int]], allocate_buffer: AllocateBuffer, deliver: Deliver
    ) -> None:
        """Fetch values of these sizes into the buffers that their jobs get, and deliver them in order; jobs without a
        buffer are skipped. Up to 8 MiB of values are requested ahead, so that Redis never waits. A value whose size has
        changed is delivered empty, one that has gone or an error as None. If Redis is lost, the remaining jobs are
        delivered as None. An exception of a callback closes the connection and passes on."""
        to_ask, asked_bytes = deque(found), 0
        asked: deque[tuple[PageJob, memoryview]] = deque()
        try:
            connection = self._connection()
            while to_ask or asked:
                commands: list[Sequence[Argument]] = []
                while to_ask and (not asked or asked_bytes + to_ask[0][1] <= READ_AHEAD_BYTES):
                    job, size = to_ask.popleft()
                    if (view := allocate_buffer(job, size)) is not None:
                        asked.append((job, view))
                        asked_bytes += size
                        commands.append((b"GET", redis_key(job.key)))
                if commands:
                    connection.send(commands)
                if asked:
                    job, view = asked[0]
                    size = len(view)
                    answer = connection.read_reply(view)
                    asked.popleft()
                    asked_bytes -= size
                    self._count_errors([answer])
                    came = view if answer == size else view[:0]
                    deliver(job, came if isinstance(answer, int) else None)
        except RedisConnectionLost as error:
            self._on_lost(error)
            for job, _ in (*asked, *to_ask):
                deliver(job, None)
        except BaseException:
            self._disconnect()  # answers that nobody read would be taken for the next ones
            raise

    def _execute(self, commands: Sequence[Sequence[Argument]]) -> list[Reply]:
        """Run the commands on this thread's connection and return their answers; the error of a single command is its
        answer, and is counted. If Redis is away or gets lost, each answer is None; a lost
        Redis counts as away until `maintain` reaches it again."""
        if not commands or not self._breaker.closed:
            return [None] * len(commands)
        try:
            answers = self._connection().execute(commands)
        except RedisConnectionLost as error:
            self._on_lost(error)
            return [None] * len(commands)
        self._count_errors(answers)
        return answers

    def _count_errors(self, answers: Sequence[Reply]) -> None:
        """Count the errors among the answers, and log the first of them."""
        errors = [answer for answer in answers if isinstance(answer, ErrorReply)]
        if errors:
            self.counts.add(errors=len(errors))
            log.warning("redis refuses", redis=str(self._address()), reason=str(errors[0]), count=len(errors))

    def _connection(self) -> RedisConnection:
        """Return the calling thread's connection; a new one if it has none, or one from before the last outage. Raises
        RedisConnectionLost if a new one cannot be made."""
        connection: RedisConnection | None = getattr(self._local, "connection", None)
        if connection is None or self._local.generation != self._generation:
            self._disconnect()
            self._local.generation = self._generation
            connection = self._local.connection = RedisConnection(self._address(), self._timeout_s)
            with self._lock:
                self._connections.add(connection)
        return connection

    def _disconnect(self) -> None:
        """Close the calling thread's connection, if it has one."""
        connection: RedisConnection | None = getattr(self._local, "connection", None)
        if connection is not None:
            self._local.connection = None
            with self._lock:
                self._connections.discard(connection)
            connection.close()

    def _on_lost(self, error: Exception) -> None:
        """Close the calling thread's connection, count the error, and treat Redis as away until `maintain` reaches it
        again. The first failure of an outage is logged."""
        self._disconnect()
        self.counts.add(errors=1)
        note_redis("pages", answered=False)
        if self._breaker.failed():
            log.warning("redis is away, its pages are misses", redis=str(self._address()), reason=str(error))


def _is_no_page(length: Reply) -> bool:
    """Return whether the answer to a length command shows that the value is too long, or no string. Other errors, such
    as LOADING or NOAUTH, tell nothing of the value."""
    if isinstance(length, ErrorReply):
        return str(length).startswith("WRONGTYPE")
    return bool(length)
