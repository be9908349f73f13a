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
# A size that is wanted so often moves to the front of the queue for idle time.
_WORTH_TIME = 2


class GraphCache(Generic[T]):
    """Keeps one item for each size, and makes at most `most` items, only of sizes in `sizes` and `at_once`.

    `capture_next` makes the items of queued sizes: at the start those of `first`, in this order. A missing item of a
    size in `at_once` is made as soon as `find` needs it. The second `find` that needs a missing item of another size
    moves the size to the front of the queue, and the `wants`-th such `find` makes the item."""

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
        # Sizes whose item exists or may be made at once.
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
        """Return the item of the smallest size that suits `wanted`. If this item is missing and not made now (see the
        class), return the item of the smallest size that suits among those that exist or are made at once; None: there
        is none. An error of making an item is raised."""
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
        `at_once`, and for another one only at its `wants`-th time. If its item cannot be made then, `find` does not try
        again. At its second time, such a size moves to the front of the queue for idle time."""
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
