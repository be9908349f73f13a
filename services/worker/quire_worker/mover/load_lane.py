"""LoadLane: loads, one after another, and RingLanding: one load's way into the ring."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Protocol

from quire_worker.mover.lane import Job, Lane
from quire_worker.mover.wire import Frame, Kind

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from quire_worker.mover.carrier import Carrier
    from quire_worker.mover.lane import Send
    from quire_worker.mover.ring import Ring


class LoadLane(Lane):
    """Fills slots of its own and hands them over; they come back by `returned`."""

    def __init__(self, carrier: Carrier, ring: Ring, send: Send, slots: Iterable[int]) -> None:
        self._free = deque(slots)
        self._waiting: list[int] = []
        super().__init__("load", carrier, ring, send)

    def returned(self, slots: Sequence[int]) -> None:
        """The engine has taken the pages."""
        with self._changed:
            self._free.extend(slots)
            self._changed.notify_all()

    def take_slot(self, job: Job) -> int:
        """A slot to be filled; waits for one, raises TransferCancelled."""
        with self._changed:
            if not self._free:
                self.tell(job)
            self._wait(job, lambda: bool(self._free))
            return self._free.popleft()

    def hand_over(self, job: Job, index: int, slot: int) -> None:
        """A page lies in a slot."""
        self._waiting += (index, slot)
        if len(self._waiting) >= 2 * self._batch:
            self.tell(job)

    def _carry(self, job: Job) -> int:
        landing = RingLanding(self, self._ring, job)
        try:
            return self._carrier.load(job.move, landing)
        finally:
            landing.close()

    def _left_over(self, job: Job) -> None:
        self.tell(job)

    def tell(self, job: Job) -> None:
        """See Slots. The engine drops what is of an earlier generation and returns its slots: no need to look again."""
        if self._waiting:
            self._send(Frame.of(Kind.ARRIVED, job.generation, job.number, self._waiting))
            self._waiting = []


class Slots(Protocol):
    """Who has slots to be filled, and tells the engine of them."""

    def take_slot(self, job: Job) -> int:
        """A slot to be filled; waits for one, raises TransferCancelled."""

    def hand_over(self, job: Job, index: int, slot: int) -> None:
        """A page lies in a slot."""

    def tell(self, job: Job) -> None:
        """The engine is to know now of all that was handed over."""

    def returned(self, slots: Sequence[int]) -> None:
        """Slots are free again."""


class RingLanding:
    """See Landing: pages of one move, in slots of its lane's."""

    def __init__(self, lane: Slots, ring: Ring, job: Job) -> None:
        self._lane = lane
        self._ring = ring
        self._job = job
        self._slot: int | None = None
        self.landed = 0

    def room(self) -> memoryview:
        """See Landing."""
        if self._slot is None:
            self._slot = self._lane.take_slot(self._job)
        return self._ring.slot(self._slot)

    def land(self) -> None:
        """See Landing."""
        slot, self._slot = self._slot, None
        if slot is None:
            raise RuntimeError("a page has landed nowhere")
        self._lane.hand_over(self._job, self.landed, slot)
        self.landed += 1

    def tell(self) -> None:
        """See Landing."""
        self._lane.tell(self._job)

    def close(self) -> None:
        """A slot in which nothing has landed is free again."""
        if self._slot is not None:
            self._lane.returned([self._slot])
            self._slot = None
