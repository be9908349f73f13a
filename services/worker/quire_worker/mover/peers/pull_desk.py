"""PullDesk: pulls that run, each on a thread of its own, since most of what a pull does is to wait for its peer."""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING

from quire_common.kv_client import TransferCancelled
from quire_common.telemetry.logs import get_logger
from quire_worker.mover.lane import BATCH_BYTES, ended, trace_move
from quire_worker.mover.peers.closed_ways import ClosedWays
from quire_worker.mover.peers.kept_connections import KeptConnections
from quire_worker.mover.peers.pull import Pull
from quire_worker.mover.transports.shared_maps import SharedMaps
from quire_worker.mover.wire import Frame, Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from quire_worker.mover.ends import Equipment
    from quire_worker.mover.lane import Job

log = get_logger(__name__)
# Pages that come one right after the other are told of together: this share of the slots.
_TELL_SHARE = 8


class PullDesk:
    """An Inward end, and the Slots of its pulls: whichever page comes first takes the next. The engine bounds how many
    pulls there are."""

    def __init__(self, given: Equipment) -> None:
        self._given = given
        self._send = given.send
        self._batch = max(1, BATCH_BYTES // given.setup.page_bytes, len(given.setup.load_slots) // _TELL_SHARE)
        self._maps = SharedMaps()
        self._changed = threading.Condition()
        self._free = deque(given.setup.load_slots)
        self._pulls: dict[int, Pull] = {}
        self._closed = ClosedWays()
        self._kept = KeptConnections()

    def put(self, job: Job) -> None:
        """See End."""
        pull = Pull(job, self, self._given, self._maps, self._closed, self._kept)
        with self._changed:
            self._pulls[job.number] = pull
        try:
            threading.Thread(target=self._run, args=(pull,), name="pull", daemon=True).start()
        except RuntimeError as error:  # the system has none left
            log.warning("a pull got no thread", cause=str(error))
            self._end(pull, 0)
            pull.close()

    def returned(self, slots: Sequence[int]) -> None:
        """See Inward and Slots."""
        with self._changed:
            self._free.extend(slots)
            self._changed.notify_all()

    def cancel(self, generation: int) -> None:
        """See End."""
        self._void(lambda pull: pull.job.generation < generation)

    def cut(self, number: int) -> None:
        """See End."""
        self._void(lambda pull: pull.job.number == number)

    def close(self) -> None:
        """See End."""
        self._void(lambda pull: True)
        self._kept.close()

    def fetched(self, number: int, pages: int) -> None:
        """See Direct."""
        with self._changed:
            pull = self._pulls.get(number)
        if pull is not None:
            pull.direct.fetched(pages)

    def take_slot(self, job: Job) -> int:
        """See Slots."""
        with self._changed:
            pull = self._pulls[job.number]
            if not self._free:
                self._tell(pull)
            self._changed.wait_for(lambda: pull.is_void or self._free)
            if pull.is_void:
                raise TransferCancelled
            return self._free.popleft()

    def hand_over(self, job: Job, index: int, slot: int) -> None:
        """See Slots. Pages are told of together, where they come together: each frame wakes the engine."""
        pull = self._pulls[job.number]
        pull.arrived += (index, slot)
        if len(pull.arrived) >= 2 * self._batch:
            self._tell(pull)

    def tell(self, job: Job) -> None:
        """See Slots."""
        self._tell(self._pulls[job.number])

    def _tell(self, pull: Pull) -> None:
        """Called by the pull's thread alone."""
        if pull.arrived:
            self._send(Frame.of(Kind.ARRIVED, pull.job.generation, pull.job.number, pull.arrived))
            pull.arrived = []

    def _void(self, which: Callable[[Pull], bool]) -> None:
        with self._changed:
            for pull in self._pulls.values():
                if which(pull):
                    pull.void()
            self._changed.notify_all()

    def _run(self, pull: Pull) -> None:
        pages = 0
        try:
            pages = pull.run()
        except Exception:
            log.exception("a pull failed")
        self._end(pull, pages)
        pull.close()

    def _end(self, pull: Pull, pages: int) -> None:
        with self._changed:
            del self._pulls[pull.job.number]
        trace_move(pull.job, pages)  # before the engine knows: it may close then
        self._send(ended(pull.job, pages, pull.used))
