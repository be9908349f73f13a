"""GraphCache: items (captured steps) by StepSize. Some are made in advance, the others when a step needs them or in
idle time. GraphCache does not know the type of its items."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, TypeVar

from quire_worker.cuda.step_size import SortedSizes, StepSize

T = TypeVar("T")
# Wanted sizes for which the choice is remembered.
_MOST_CHOSEN = 65_536
# So often must a size be wanted that time is spent on it: no more than so many are made.
_WORTH_TIME = 2


class GraphCache(Generic[T]):
    """Only items of `sizes` and of `at_once` are made, `most` of them in all. The `first` sizes are queued at the
    start, in this order, for `capture_next`. An item of `at_once` is made when it is wanted. Other sizes that have no
    item yet are queued, before all others, when they are wanted for the second time, and made when they are wanted for
    the `wants`-th time."""

    def __init__(
        self,
        sizes: Sequence[StepSize],
        first: Iterable[StepSize],
        make: Callable[[StepSize], T],
        most: int,
        wants: int,
        at_once: Sequence[StepSize] = (),
    ) -> None:
        self._sizes = SortedSizes([*at_once, *sizes])
        self._at_once = frozenset(at_once)
        # Those that exist or are made at once.
        self._usable = SortedSizes(at_once)
        self._missing = deque(first)
        self._make = make
        self._most = most
        self._wants = wants
        self._wanted: Counter[StepSize] = Counter()
        self._made: dict[StepSize, T] = {}
        self._least: dict[StepSize, StepSize | None] = {}

    def __len__(self) -> int:
        return len(self._made)

    @property
    def has_missing(self) -> bool:
        """Whether a size is still queued to be made in idle time."""
        while self._missing and self._missing[0] in self._made:
            self._missing.popleft()
        return bool(self._missing)

    def find(self, wanted: StepSize) -> T | None:
        """Return the item of the smallest size that suits `wanted`. If it does not exist yet and is not to be made now
        (see the class), return the item of the smallest size that suits among those that exist or are made at once;
        None: there is none. An error of making an item is raised."""
        if wanted not in self._least:
            if len(self._least) >= _MOST_CHOSEN:
                self._least.clear()
            self._least[wanted] = self._sizes.least_that_suits(wanted)
        size = self._least[wanted]
        if size is not None and size not in self._made and self._defer(size):
            size = self._usable.least_that_suits(wanted)
        return None if size is None else self._get(size)

    def capture_next(self) -> None:
        """Make the next size that is queued, if there is one."""
        if self.has_missing:
            self._get(self._missing[0])

    def give_up(self) -> None:
        """Make nothing more: for the rest of its life, `find` looks only at the items that exist."""
        self._missing.clear()
        self._wanted.clear()
        self._at_once = frozenset()
        self._sizes = self._usable = SortedSizes(self._made)
        self._least.clear()

    def _defer(self, size: StepSize) -> bool:
        """Count that this size was wanted; returns whether to leave it for later. This is False for a size of
        `at_once`, and for another one only at its `wants`-th time, so an item that could not be made then is not tried
        again by `find`. At its second time the size is queued, first of all, for idle time."""
        if size in self._at_once:
            return False
        self._wanted[size] += 1
        if self._wanted[size] == self._wants:
            return False
        if self._wanted[size] == _WORTH_TIME:
            self._missing.appendleft(size)
        return True

    def _get(self, size: StepSize) -> T:
        """Return the item of a size, made now if there is none. Once it is the last of `most` items, nothing more is
        made (see `give_up`)."""
        if size not in self._made:
            self._made[size] = self._make(size)
            self._usable = SortedSizes({*self._made, *self._at_once})
            if len(self._made) == self._most:
                self.give_up()
        return self._made[size]
