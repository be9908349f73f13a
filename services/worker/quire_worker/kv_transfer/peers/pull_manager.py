"""PullManager: the running pulls. Each has a thread of its own, since a pull mostly waits for its peer."""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING

from quire_common.kv.kv_client import TransferCancelled
from quire_common.telemetry.logs import get_logger
from quire_worker.kv_transfer.job_queue import BATCH_BYTES, ended_frame, trace_move
from quire_worker.kv_transfer.peers.connection_pool import ConnectionPool
from quire_worker.kv_transfer.peers.peer_hosts import PeerHosts
from quire_worker.kv_transfer.peers.pull import Pull
from quire_worker.kv_transfer.transports.fallback import PEER_RULES, FallbackPolicy
from quire_worker.kv_transfer.transports.shared_map import SharedMapCache
from quire_worker.kv_transfer.wire import AgentFrameKind
from quire_worker.side_process.frames import Frame

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from quire_worker.kv_transfer.handlers import AgentContext
    from quire_worker.kv_transfer.job_queue import Job

log = get_logger(__name__)
# Pages that come one right after the other are told of together: this share of the slots.
_TELL_SHARE = 8


class PullManager:
    """A LoadHandler, and the SlotSource of its pulls: the next page to arrive, of whichever pull, takes the next free
    slot. The engine bounds the number of pulls."""

    def __init__(self, context: AgentContext) -> None:
        self._context = context
        self._send = context.send
        self._batch = max(1, BATCH_BYTES // context.setup.page_bytes, len(context.setup.load_slots) // _TELL_SHARE)
        self._hosts = PeerHosts(context.setup.peer_hosts)
        self._maps = SharedMapCache()
        self._changed = threading.Condition()
        self._free = deque(context.setup.load_slots)
        self._pulls: dict[int, Pull] = {}
        self._fallback = FallbackPolicy(PEER_RULES)
        self._connection_pool = ConnectionPool()

    def start_job(self, job: Job) -> None:
        """Start a pull on a thread of its own. If the system has no thread left, this is logged, and the pull ends at
        once: the engine is told that no page came."""
        pull = Pull(job, self, self._context, self._hosts, self._maps, self._fallback, self._connection_pool)
        with self._changed:
            self._pulls[job.number] = pull
        try:
            threading.Thread(target=self._run_pull, args=(pull,), name="pull", daemon=True).start()
        except RuntimeError as error:  # the system has none left
            log.warning("a pull got no thread", cause=str(error))
            self._end(pull, 0)
            pull.close()

    def return_slots(self, slots: Sequence[int]) -> None:
        """Free these slots, whose pages the engine has taken; pulls may wait for them."""
        with self._changed:
            self._free.extend(slots)
            self._changed.notify_all()

    def cancel_before(self, generation: int) -> None:
        self._cancel_where(lambda pull: pull.job.generation < generation)

    def cancel_job(self, number: int) -> None:
        self._cancel_where(lambda pull: pull.job.number == number)

    def close(self) -> None:
        self._cancel_where(lambda pull: True)
        self._connection_pool.close()

    def fetched(self, number: int, pages: int) -> None:
        """Pass the engine's answer to a fetch, the number of pages or -1, on to the pull that waits for it. Ignored if
        the pull has ended."""
        with self._changed:
            pull = self._pulls.get(number)
        if pull is not None:
            pull.direct.fetched(pages)

    def take_slot(self, job: Job) -> int:
        """Take a free slot for the pull's next page. If there is none, report the pull's landed pages to the engine,
        and wait. Raises TransferCancelled if the pull was cancelled, also before the call. The pull's thread alone
        calls this."""
        with self._changed:
            pull = self._pulls[job.number]
            if not self._free:
                self._deliver(pull)
            self._changed.wait_for(lambda: pull.is_cancelled or self._free)
            if pull.is_cancelled:
                raise TransferCancelled
            return self._free.popleft()

    def deliver_slot(self, job: Job, index: int, slot: int) -> None:
        """Record that a page has landed in a slot. The engine is told of several such pages at a time, since each frame
        wakes it: of BATCH_BYTES, or of an eighth of the slots if that is more. It is told sooner by `flush`, and when
        the pull waits for a slot."""
        pull = self._pulls[job.number]
        if pull.add_undelivered(index, slot) >= self._batch:
            self._deliver(pull)

    def flush(self, job: Job) -> None:
        self._deliver(self._pulls[job.number])

    def _deliver(self, pull: Pull) -> None:
        """Tell the engine, by ARRIVED, of the pull's pages that have landed since the last time. Called by the pull's
        thread alone."""
        if undelivered := pull.take_undelivered():
            self._send(Frame.of(AgentFrameKind.ARRIVED, pull.job.generation, pull.job.number, undelivered))

    def _cancel_where(self, which: Callable[[Pull], bool]) -> None:
        """Cancel the pulls for which `which` is true, and abort their connections, without waiting for their threads.
        All pulls that wait for a free slot of the ring are woken; those that were not cancelled wait again."""
        with self._changed:
            for pull in self._pulls.values():
                if which(pull):
                    pull.cancel()
            self._changed.notify_all()

    def _run_pull(self, pull: Pull) -> None:
        """Run a pull on its own thread, tell the engine how many pages came, and close the pull. An unforeseen error
        is logged, not raised, and counts as no page."""
        pages = 0
        try:
            pages = pull.run()
        except Exception:
            log.exception("a pull failed")
        self._end(pull, pages)
        pull.close()

    def _end(self, pull: Pull, pages: int) -> None:
        """Forget a pull, trace it, and tell the engine that it has ended with so many pages."""
        with self._changed:
            del self._pulls[pull.job.number]
        trace_move(pull.job, pages)  # before the engine knows: it may close then
        self._send(ended_frame(pull.job, pages, pull.last_used))
