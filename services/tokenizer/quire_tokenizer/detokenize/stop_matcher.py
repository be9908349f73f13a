"""Finds stop strings in text that arrives in pieces. A stop string is found as soon as its last character has come.

The match that ends first wins; if several matches end together, the longest wins. The result does not depend on how the
text was cut into pieces.

The matcher builds no automaton. It sorts the stop strings once. Its only state is the held text: the suffix of the text
that may become a stop string. This suffix is found by bisection in the sorted strings. A beginning that fails is never
tried again, so each character is tried at most twice on average, and the time is linear in the text. This module knows
nothing of tokens.
"""

from __future__ import annotations

from bisect import bisect_right
from functools import lru_cache
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

if TYPE_CHECKING:
    from collections.abc import Sequence

# The number of sorted lists that are kept for later requests. With the largest allowed lists, they take 4 MiB at most.
_KEPT = 32


class StopStrings:
    """A sorted list of stop strings. It is immutable, and requests with the same stop strings share it."""

    __slots__ = ("__weakref__", "_ending", "_index", "_reach", "_sorted", "firsts", "lasts")

    def __init__(self, stops: Sequence[str]) -> None:
        self._index: dict[str, int] = {}
        for number, stop in enumerate(stops):
            if stop:
                self._index.setdefault(stop, number)
        self._sorted = sorted(self._index)
        # The length of the longest beginning of a stop string that is not the whole string.
        self._reach = max(map(len, self._sorted), default=1) - 1
        self.firsts = frozenset(stop[0] for stop in self._sorted)
        ending: dict[str, list[str]] = {}
        for stop in sorted(self._sorted, key=len, reverse=True):
            ending.setdefault(stop[-1], []).append(stop)
        # The stop strings by their last character; longer strings come first.
        self._ending = {char: tuple(group) for char, group in ending.items()}
        self.lasts = frozenset(ending)

    def ending_at(self, text: str, end: int) -> tuple[int, int]:
        """Return the index (in the list that was given) and the length of the longest stop string that ends at position
        `end` of the text; (-1, 0) if no stop string ends there."""
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
                # In the sorted list, strings that begin with `part` follow it directly.
                following = bisect_right(ordered, part)
                if following < len(ordered) and ordered[following].startswith(part):
                    return part
        return ""


_in_use: WeakValueDictionary[tuple[str, ...], StopStrings] = WeakValueDictionary()


def stop_strings(stops: tuple[str, ...]) -> StopStrings:
    """Return the StopStrings for this list. Requests with the same list share one object, and some objects are kept,
    because clients send the same lists again and again."""
    found = _in_use.get(stops)
    return _sorted_once(stops) if found is None else found


@lru_cache(maxsize=_KEPT)
def _sorted_once(stops: tuple[str, ...]) -> StopStrings:
    made = _in_use[stops] = StopStrings(stops)
    return made


class StopMatcher:
    """The search in one text. `held` has the characters at the end of the text that may become a stop string.
    `stop_index` and `stop_length` describe the match; the index is -1 until there is a match."""

    __slots__ = ("_stops", "held", "stop_index", "stop_length")

    def __init__(self, stops: StopStrings) -> None:
        self._stops = stops
        self.held = ""
        self.stop_index = -1
        self.stop_length = 0

    def take_held(self) -> str:
        """Return the held text, and hold it no longer."""
        held, self.held = self.held, ""
        return held

    def feed(self, text: str, armed: bool = True) -> int:
        """Search the next piece of text. Returns the number of its characters up to the end of the first match, and
        sets `stop_index` and `stop_length`; -1 if there is no match. Without a match, `held` is the end of the text
        that may become a match. Without `armed`, matches that end in this piece do not count; a later match may
        begin in it."""
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
