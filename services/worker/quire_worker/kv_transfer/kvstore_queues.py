"""LoadQueue and StoreQueue: the loads and stores of a kvstore, and the paths of their pages into and out of the
ring."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Protocol

from quire_worker.kv_transfer.job_queue import Job, JobQueue
from quire_worker.kv_transfer.wire import AgentFrameKind
from quire_worker.side_process.frames import Frame

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from quire_worker.kv_transfer.job_queue import Send
    from quire_worker.kv_transfer.kv_connector import KvConnector
    from quire_worker.kv_transfer.ring import Ring


class LoadQueue(JobQueue):
    """Fills its own slots of the ring and hands them to the engine, which returns them by `return_slots`."""

    def __init__(self, connector: KvConnector, ring: Ring, send: Send, slots: Iterable[int]) -> None:
        self._free = deque(slots)
        self._waiting: list[int] = []
        super().__init__("load", connector, ring, send)

    def return_slots(self, slots: Sequence[int]) -> None:
        """Free these slots: the engine has taken their pages."""
        with self._changed:
            self._free.extend(slots)
            self._changed.notify_all()

    def take_slot(self, job: Job) -> int:
        """Take a free slot to fill; if there is none, announce the pages delivered so far and wait. Raises
        TransferCancelled if the job was cancelled or is over."""
        with self._changed:
            if not self._free:
                self.flush(job)
            self._wait(job, lambda: bool(self._free))
            return self._free.popleft()

    def deliver_slot(self, job: Job, index: int, slot: int) -> None:
        """Note that page `index` lies in `slot`, to be announced to the engine. Pages are announced together, once they
        are BATCH_BYTES, or by `flush`."""
        self._waiting += (index, slot)
        if len(self._waiting) >= 2 * self._batch:
            self.flush(job)

    def _transfer(self, job: Job) -> int:
        """Load the job's pages into ring slots; returns how many came. A slot that was taken and not filled becomes
        free again."""
        sink = RingPageSink(self, self._ring, job)
        try:
            return self._connector.load(job.move, sink)
        finally:
            sink.close()

    def _on_job_end(self, job: Job) -> None:
        self.flush(job)

    def flush(self, job: Job) -> None:
        """Announce to the engine, by ARRIVED, the pages that were delivered and not announced yet. If the job was
        cancelled meanwhile, the engine drops its pages and returns the slots to this queue, so no check is needed."""
        if self._waiting:
            self._send(Frame.of(AgentFrameKind.ARRIVED, job.generation, job.number, self._waiting))
            self._waiting = []


class SlotSource(Protocol):
    """Keeps the slots that are to be filled, and tells the engine of filled ones."""

    def take_slot(self, job: Job) -> int:
        """Take a free slot to fill, waiting for one; raises TransferCancelled."""

    def deliver_slot(self, job: Job, index: int, slot: int) -> None:
        """Hand the page in a slot to the engine. The engine may be told later."""

    def flush(self, job: Job) -> None:
        """Tell the engine now of all pages that were delivered."""

    def return_slots(self, slots: Sequence[int]) -> None:
        """Free these slots."""


class RingPageSink:
    """Implements PageSink: pages of one move, in slots of its queue."""

    def __init__(self, lane: SlotSource, ring: Ring, job: Job) -> None:
        self._lane = lane
        self._ring = ring
        self._job = job
        self._slot: int | None = None
        self.received_pages = 0

    def next_buffer(self) -> memoryview:
        """Return the slot for the next page: the same slot until the page is committed. Waits for a free slot; raises
        TransferCancelled if the move is cancelled."""
        if self._slot is None:
            self._slot = self._lane.take_slot(self._job)
        return self._ring.slot(self._slot)

    def commit_page(self) -> None:
        """Hand the slot that `next_buffer` returned to the engine, as the next page, and count the page as received;
        the engine may be told later (see `deliver_slot`). Raises RuntimeError if no slot was taken."""
        slot, self._slot = self._slot, None
        if slot is None:
            raise RuntimeError("a page has landed nowhere")
        self._lane.deliver_slot(self._job, self.received_pages, slot)
        self.received_pages += 1

    def skip_pages(self, pages: int) -> None:
        """Count the next pages as received: they reached the pool without the ring."""
        self.received_pages += pages

    def flush(self) -> None:
        self._lane.flush(self._job)

    def close(self) -> None:
        """Give back a slot that was taken and not filled."""
        if self._slot is not None:
            self._lane.return_slots([self._slot])
            self._slot = None


class StoreQueue(JobQueue):
    """Asks the engine for pages, receives the slots that hold them by `filled`, and returns each slot once its page was
    sent."""

    def __init__(self, connector: KvConnector, ring: Ring, send: Send) -> None:
        self._filled: dict[int, int] = {}
        self._emptied: list[int] = []
        super().__init__("store", connector, ring, send)

    def filled(self, generation: int, number: int, pairs: Sequence[tuple[int, int]]) -> None:
        """Note which slots hold pages of the running job, as (index, slot), and wake its thread. Slots of a job that is
        over or cancelled go back to the engine at once."""
        with self._changed:
            job = self._current
            if job is not None and (job.generation, job.number) == (generation, number) and not self._is_cancelled(job):
                self._filled.update(pairs)
                self._changed.notify_all()
                return
        self._release([slot for _, slot in pairs])

    def request_pages(self, job: Job, indices: Sequence[int]) -> None:
        """Ask the engine to put these pages into the ring, in this order."""
        self._send(Frame.of(AgentFrameKind.WANTED, job.generation, job.number, indices))

    def is_filled(self, index: int) -> bool:
        """Whether the page is in the ring."""
        return index in self._filled

    def slot_of(self, job: Job, index: int) -> int:
        """Return the slot that holds a page, and wait for the page if need be. Before it waits, it returns emptied
        slots to the engine, which may have no others. Raises TransferCancelled if the job was cancelled or is over."""
        with self._changed:
            self._wait(job, lambda: True)
            if index not in self._filled:
                self._release_emptied()
            self._wait(job, lambda: index in self._filled)
            return self._filled[index]

    def release_page(self, index: int) -> None:
        """Record that a page was sent, so that its slot is empty. Emptied slots go back to the engine together, once
        they are BATCH_BYTES, before `slot_of` waits for a page, and at the job's end."""
        with self._changed:
            self._emptied.append(self._filled.pop(index))
            if len(self._emptied) >= self._batch:
                self._release_emptied()

    def _transfer(self, job: Job) -> int:
        return self._connector.store(job.move, RingPageSource(self, self._ring, job))

    def _on_job_end(self, job: Job) -> None:
        """Give all slots of the ended job back to the engine, whether their pages were sent or not."""
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
