"""Ends: what a mover process is made of. One end brings pages into the ring, the other takes them out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from quire_worker.mover.lane import Job, Send
    from quire_worker.mover.ring import Ring
    from quire_worker.mover.setup import MoverSetup
    from quire_worker.mover.transports.ring_agent import RingAgent


@dataclass(frozen=True, slots=True)
class Equipment:
    """What there is to make them from. `listeners` are descriptors that the engine bound, which outlive the process;
    `silence_s` says for how long nothing has come from the engine, which gives signs of life twice a second."""

    setup: MoverSetup
    ring: Ring
    send: Send
    listeners: tuple[int, ...]
    silence_s: Callable[[], float]
    nixl: RingAgent | None = None
    """Of peers that exchange pages by NIXL."""


class End(Protocol):
    """All methods are called from the process's main thread and return at once."""

    def put(self, job: Job) -> None:
        """Carry it out, and send ENDED in the end, unless it has become void."""

    def cancel(self, generation: int) -> None:
        """Jobs of earlier generations are void."""

    def cut(self, number: int) -> None:
        """That job is void, if it is here."""

    def close(self) -> None:
        """Void all jobs."""


class Inward(End, Protocol):
    """Sends ARRIVED."""

    def returned(self, slots: Sequence[int]) -> None:
        """The engine has taken what lay there."""


class Outward(End, Protocol):
    """Sends WANTED and RELEASED."""

    def filled(self, generation: int, number: int, pairs: Sequence[tuple[int, int]]) -> None:
        """Pages of that job lie in the ring, as index and slot."""


class Direct(Protocol):
    """For pages that go from pool to pool without a ring. Sends FETCH and KEPT."""

    def offered(self, number: int, pages: int) -> None:
        """So many pages of an export are filled."""

    def fetched(self, number: int, pages: int) -> None:
        """So many more pages of a pull are in the pool; negative: they cannot be fetched."""


class Ends(NamedTuple):
    """`direct` is of peers alone."""

    inward: Inward
    outward: Outward
    direct: Direct | None = None


MakeEnds = Callable[[Equipment], Ends]
