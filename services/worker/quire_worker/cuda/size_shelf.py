"""SizeShelf: what is made by StepSize, some of it before it is wanted, the rest when it first is. Knows nothing of what
that is."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, TypeVar

from quire_worker.cuda.step_size import StepSize, least_that_holds

T = TypeVar("T")
# Wanted sizes for which the choice is remembered.
_MOST_CHOSEN = 65_536


class SizeShelf(Generic[T]):
    """`sizes` may be made, `first` of them in advance and in this order; no more than `most` are."""

    def __init__(
        self, sizes: Sequence[StepSize], first: Iterable[StepSize], make: Callable[[StepSize], T], most: int
    ) -> None:
        self._sizes = sizes
        self._missing = deque(first)
        self._make = make
        self._most = most
        self._made: dict[StepSize, T] = {}
        self._chosen: dict[StepSize, T | None] = {}

    def __len__(self) -> int:
        return len(self._made)

    @property
    def lacks(self) -> bool:
        """Whether something is still to be made in advance."""
        while self._missing and self._missing[0] in self._made:
            self._missing.popleft()
        return bool(self._missing)

    def find(self, wanted: StepSize) -> T | None:
        """The smallest that suits the wanted size, made now if it was not; None: there is none."""
        if wanted not in self._chosen:
            if len(self._chosen) >= _MOST_CHOSEN:
                self._chosen.clear()
            size = least_that_holds(self._sizes, wanted)
            self._chosen[wanted] = None if size is None else self._get(size)
        return self._chosen[wanted]

    def make_next(self) -> None:
        """Make the next that is lacking."""
        if self.lacks:
            self._get(self._missing[0])

    def give_up(self) -> None:
        """Make do with what there is."""
        self._missing.clear()
        self._sizes = tuple(self._made)
        self._chosen.clear()

    def _get(self, size: StepSize) -> T:
        if size not in self._made:
            self._made[size] = self._make(size)
            if len(self._made) == self._most:
                self.give_up()
        return self._made[size]
