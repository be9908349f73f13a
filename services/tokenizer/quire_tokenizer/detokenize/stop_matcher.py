"""Stop strings over text that arrives in pieces: found as soon as their last character is there.

No automaton: the strings are sorted once, and what is held back is the one state. A suffix of the text that may become
a stop string is found by bisection, and each character is tried as such a beginning twice at most on average, since a
beginning that fails is never tried again. So time is linear in the text, nothing needs to be built, and a sequence
keeps no more than the text that it holds back. The match that ends first wins; of those that end together, the longest.
The result does not depend on how the text was cut into pieces. Knows nothing of tokens.
"""

from __future__ import annotations

from bisect import bisect_right
from functools import lru_cache
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

if TYPE_CHECKING:
    from collections.abc import Sequence

# Lists that nobody uses at the moment: as many of the largest allowed take 4 MiB at most.
_KEPT = 32


class StopStrings:
    """The stop strings, sorted; immutable, shared by all requests that have the same."""

    __slots__ = ("__weakref__", "_ending", "_index", "_reach", "_sorted", "firsts", "lasts")

    def __init__(self, stops: Sequence[str]) -> None:
        self._index: dict[str, int] = {}
        for number, stop in enumerate(stops):
            if stop:
                self._index.setdefault(stop, number)
        self._sorted = sorted(self._index)
        # The longest beginning of a stop string that is not the whole.
        self._reach = max(map(len, self._sorted), default=1) - 1
        self.firsts = frozenset(stop[0] for stop in self._sorted)
        ending: dict[str, list[str]] = {}
        for stop in sorted(self._sorted, key=len, reverse=True):
            ending.setdefault(stop[-1], []).append(stop)
        # By their last character, the longest first.
        self._ending = {char: tuple(group) for char, group in ending.items()}
        self.lasts = frozenset(ending)

    def ending_at(self, text: str, end: int) -> tuple[int, int]:
        """Return index and length of the longest stop string that ends at position `end` of the text; (-1, 0) where
        none does."""
        group = self._ending.get(text[end - 1], ())
        if text.endswith(group, 0, end):
            for stop in group:
                if text.endswith(stop, 0, end):
                    return self._index[stop], len(stop)
        return -1, 0

    def beginning(self, text: str) -> str:
        """Return the longest end of the text that begins a stop string, but is not the whole of it."""
        if len(text) > self._reach:
            text = text[len(text) - self._reach :]
        ordered, firsts = self._sorted, self.firsts
        for start, char in enumerate(text):
            if char in firsts:
                part = text[start:]
                # Strings that continue it come right behind it in the order.
                following = bisect_right(ordered, part)
                if following < len(ordered) and ordered[following].startswith(part):
                    return part
        return ""


_in_use: WeakValueDictionary[tuple[str, ...], StopStrings] = WeakValueDictionary()


def stop_strings(stops: tuple[str, ...]) -> StopStrings:
    """One for all that have the same list at the same time; and clients send the same lists again and again."""
    found = _in_use.get(stops)
    return _sorted_once(stops) if found is None else found


@lru_cache(maxsize=_KEPT)
def _sorted_once(stops: tuple[str, ...]) -> StopStrings:
    made = _in_use[stops] = StopStrings(stops)
    return made


class StopMatcher:
    """Where one text stands: `held` are the characters at its end that may become a stop string."""

    __slots__ = ("_stops", "held", "stop_index", "stop_length")

    def __init__(self, stops: StopStrings) -> None:
        self._stops = stops
        self.held = ""
        self.stop_index = -1
        self.stop_length = 0

    def take_held(self) -> str:
        """What was held back, which no longer is."""
        held, self.held = self.held, ""
        return held

    def feed(self, text: str, armed: bool = True) -> int:
        """Search text that has come. Returns how many of its characters go up to the end of the first match, or -1;
        then `held` is the end of the text that may become a match. Unless `armed`, a match does not count."""
        stops, held = self._stops, self.held
        if not held and stops.firsts.isdisjoint(text):
            return -1
        whole, lasts = held + text, stops.lasts
        if armed and not lasts.isdisjoint(text):
            for position, char in enumerate(text, 1):
                if char in lasts:
                    index, length = stops.ending_at(whole, len(held) + position)
                    if index >= 0:
                        self.held, self.stop_index, self.stop_length = "", index, length
                        return position
        self.held = stops.beginning(whole)
        return -1
