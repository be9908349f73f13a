"""LoadQueue and StoreQueue: a kvstore's loads and stores, one after another of each, and the ways of their pages into
the ring and out of it."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Protocol

from quire_worker.kv_transfer.job_queue import Job, JobQueue
from quire_worker.kv_transfer.wire import AgentFrameKind, Frame

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from quire_worker.kv_transfer.job_queue import Send
    from quire_worker.kv_transfer.kv_connector import KvConnector
    from quire_worker.kv_transfer.ring import Ring


class LoadQueue(JobQueue):
    """Fills slots of its own and hands them over; they come back by `returned`."""

    def __init__(self, connector: KvConnector, ring: Ring, send: Send, slots: Iterable[int]) -> None:
        self._free = deque(slots)
        self._waiting: list[int] = []
        super().__init__("load", connector, ring, send)

    def return_slots(self, slots: Sequence[int]) -> None:
        """The engine has taken the pages."""
        with self._changed:
            self._free.extend(slots)
            self._changed.notify_all()

    def take_slot(self, job: Job) -> int:
        """A slot to be filled; waits for one, raises TransferCancelled."""
        with self._changed:
            if not self._free:
                self.flush(job)
            self._wait(job, lambda: bool(self._free))
            return self._free.popleft()

    def deliver_slot(self, job: Job, index: int, slot: int) -> None:
        """A page lies in a slot."""
        self._waiting += (index, slot)
        if len(self._waiting) >= 2 * self._batch:
            self.flush(job)

    def _transfer(self, job: Job) -> int:
        sink = RingPageSink(self, self._ring, job)
        try:
            return self._connector.load(job.move, sink)
        finally:
            sink.close()

    def _on_job_end(self, job: Job) -> None:
        self.flush(job)

    def flush(self, job: Job) -> None:
        """The engine drops what is of an earlier generation and returns its slots: no need to look
        again."""
        if self._waiting:
            self._send(Frame.of(AgentFrameKind.ARRIVED, job.generation, job.number, self._waiting))
            self._waiting = []


class SlotSource(Protocol):
    """Keeps the slots that are to be filled, and tells the engine of filled ones."""

    def take_slot(self, job: Job) -> int:
        """A slot to be filled; waits for one, raises TransferCancelled."""

    def deliver_slot(self, job: Job, index: int, slot: int) -> None:
        """A page lies in a slot."""

    def flush(self, job: Job) -> None:
        """The engine is to know now of all that was handed over."""

    def return_slots(self, slots: Sequence[int]) -> None:
        """Slots are free again."""


class RingPageSink:
    """Implements PageSink: pages of one move, in slots of its queue."""

    def __init__(self, lane: SlotSource, ring: Ring, job: Job) -> None:
        self._lane = lane
        self._ring = ring
        self._job = job
        self._slot: int | None = None
        self.received_pages = 0

    def next_buffer(self) -> memoryview:
        if self._slot is None:
            self._slot = self._lane.take_slot(self._job)
        return self._ring.slot(self._slot)

    def commit_page(self) -> None:
        slot, self._slot = self._slot, None
        if slot is None:
            raise RuntimeError("a page has landed nowhere")
        self._lane.deliver_slot(self._job, self.received_pages, slot)
        self.received_pages += 1

    def skip_pages(self, pages: int) -> None:
        """The next pages have come past the ring."""
        self.received_pages += pages

    def flush(self) -> None:
        self._lane.flush(self._job)

    def close(self) -> None:
        """A slot in which nothing has landed is free again."""
        if self._slot is not None:
            self._lane.return_slots([self._slot])
            self._slot = None


class StoreQueue(JobQueue):
    """Asks for pages, gets slots that hold them by `filled`, and gives each back when its page was sent."""

    def __init__(self, connector: KvConnector, ring: Ring, send: Send) -> None:
        self._filled: dict[int, int] = {}
        self._emptied: list[int] = []
        super().__init__("store", connector, ring, send)

    def filled(self, generation: int, number: int, pairs: Sequence[tuple[int, int]]) -> None:
        """Pages lie in the ring, as index and slot."""
        with self._changed:
            job = self._current
            if job is not None and (job.generation, job.number) == (generation, number) and not self._is_cancelled(job):
                self._filled.update(pairs)
                self._changed.notify_all()
                return
        self._release([slot for _, slot in pairs])

    def request_pages(self, job: Job, indices: Sequence[int]) -> None:
        """The engine is to put these into the ring."""
        self._send(Frame.of(AgentFrameKind.WANTED, job.generation, job.number, indices))

    def is_filled(self, index: int) -> bool:
        """Whether a page is there."""
        return index in self._filled

    def slot_of(self, job: Job, index: int) -> int:
        """Where a page lies; waits for it, raises TransferCancelled. Slots that are told of late are told of now: the
        engine may have no other."""
        with self._changed:
            self._wait(job, lambda: True)
            if index not in self._filled:
                self._release_emptied()
            self._wait(job, lambda: index in self._filled)
            return self._filled[index]

    def release_page(self, index: int) -> None:
        """A page's slot is the engine's again."""
        with self._changed:
            self._emptied.append(self._filled.pop(index))
            if len(self._emptied) >= self._batch:
                self._release_emptied()

    def _transfer(self, job: Job) -> int:
        return self._connector.store(job.move, RingPageSource(self, self._ring, job))

    def _on_job_end(self, job: Job) -> None:
        self._emptied.extend(self._filled.values())
        self._filled.clear()
        self._release_emptied()

    def _release_emptied(self) -> None:
        emptied, self._emptied = self._emptied, []
        self._release(emptied)

    def _release(self, slots: Sequence[int]) -> None:
        if slots:
            self._send(Frame.of(AgentFrameKind.RELEASED, 0, 0, slots))


class RingPageSource:
    """Implements PageSource: one store's pages, in slots that the engine fills."""

    def __init__(self, lane: StoreQueue, ring: Ring, job: Job) -> None:
        self._lane = lane
        self._ring = ring
        self._job = job
        self.fd = ring.fd
        self.remaining: list[int] = []

    def request_pages(self, indices: Sequence[int]) -> None:
        self.remaining = list(indices)
        self._lane.request_pages(self._job, indices)

    def is_ready(self, index: int) -> bool:
        return self._lane.is_filled(index)

    def page_body(self, index: int) -> memoryview:
        return self._ring.slot(self._lane.slot_of(self._job, index))

    def page_offset(self, index: int) -> int:
        return self._ring.offset_of(self._lane.slot_of(self._job, index))

    def release_page(self, index: int) -> None:
        self._lane.release_page(index)
        self.remaining.remove(index)
