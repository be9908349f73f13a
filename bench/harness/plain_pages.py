"""Where pages land and where they leave from, in a ring without an engine: for tests and benchmarks of carriers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from quire_worker.mover.ring import Ring


def ids(*values: int) -> NDArray[np.int32]:
    """Page numbers as a move has them."""
    return np.array(values, np.int32)


class PlainLanding:
    """Implements Landing: page n lands in slot n of the ring, and is told of by `on_land`."""

    def __init__(self, ring: Ring, on_land: Callable[[int], None] = lambda index: None, first_slot: int = 0) -> None:
        self._ring = ring
        self._on_land = on_land
        self._first_slot = first_slot
        self.landed = 0

    def room(self) -> memoryview:
        return self._ring.slot(self._first_slot + self.landed)

    def land(self) -> None:
        self.landed += 1
        self._on_land(self.landed - 1)

    def tell(self) -> None:
        """All are told of already."""

    def bodies(self) -> list[bytes]:
        return [bytes(self._ring.slot(self._first_slot + index)) for index in range(self.landed)]


class PlainShipment:
    """Implements Shipment: page n lies in slot n of the ring. `on_body` is told what is asked for, and may raise."""

    def __init__(self, ring: Ring, on_body: Callable[[int], None] = lambda index: None, first_slot: int = 0) -> None:
        self._ring = ring
        self._on_body = on_body
        self._first_slot = first_slot
        self.fd = ring.fd
        self.left: list[int] = []
        self.wanted: list[int] = []
        self.sent: list[int] = []

    def want(self, indices: Sequence[int]) -> None:
        self.left, self.wanted = list(indices), list(indices)

    def ready(self, index: int) -> bool:
        return True

    def body(self, index: int) -> memoryview:
        self._on_body(index)
        return self._ring.slot(self._first_slot + index)

    def place(self, index: int) -> int:
        return self._ring.place(self._first_slot + index)

    def gone(self, index: int) -> None:
        self.left.remove(index)
        self.sent.append(index)
