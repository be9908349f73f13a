"""Stop strings over text that arrives in pieces: found as soon as their last character is there.

An Aho-Corasick automaton: time is linear in the text whatever the number of stop strings, the result does not depend
on how the text was cut into pieces, and the automaton's depth is exactly what must be held back. The match that ends
first wins; of those that end together, the longest. Knows nothing of tokens.
"""

from __future__ import annotations

from collections import deque
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_CACHED = 128
# A state takes some 300 bytes, and there may be one per character.
_CACHED_CHARS = 256


class StopAutomaton:
    """The stop strings, compiled; immutable, shared by all requests that have the same. State 0 is the root."""

    __slots__ = ("fail", "first", "goto", "hold", "length", "stop")

    def __init__(self, stops: Sequence[str]) -> None:
        self.goto: list[dict[str, int]] = [{}]
        self.stop: list[int] = [-1]  # index of the longest stop string that ends here
        self.length: list[int] = [0]  # its length
        self.hold: list[int] = [0]  # characters that may yet become a stop string
        self.fail: list[int] = [0]
        for index, stop in enumerate(stops):
            self._add(index, stop)
        self.first = frozenset(self.goto[0])
        self._link()

    def _add(self, index: int, stop: str) -> None:
        node = 0
        for depth, char in enumerate(stop, 1):
            following = self.goto[node].get(char)
            if following is None:
                following = len(self.goto)
                self.goto[node][char] = following
                self.goto.append({})
                self.stop.append(-1)
                self.length.append(0)
                self.hold.append(depth)
                self.fail.append(0)
            node = following
        if node and self.stop[node] < 0:
            self.stop[node], self.length[node] = index, len(stop)

    def _link(self) -> None:
        """Breadth first, so that a node's shorter suffixes are done before it."""
        queue = deque(self.goto[0].values())
        while queue:
            node = queue.popleft()
            for char, following in self.goto[node].items():
                state = self.fail[node]
                while state and char not in self.goto[state]:
                    state = self.fail[state]
                self.fail[following] = self.goto[state].get(char, 0)
                queue.append(following)
            shorter = self.fail[node]
            if self.stop[node] < 0:
                self.stop[node], self.length[node] = self.stop[shorter], self.length[shorter]
            if not self.goto[node]:
                # A whole stop string that no other continues: if it did not count, only its end may still matter.
                self.hold[node] = self.hold[shorter]


def compile_stops(stops: tuple[str, ...]) -> StopAutomaton:
    """Clients send the same stop strings again and again: small ones, which are kept."""
    return _kept(stops) if sum(map(len, stops)) <= _CACHED_CHARS else StopAutomaton(stops)


@lru_cache(maxsize=_CACHED)
def _kept(stops: tuple[str, ...]) -> StopAutomaton:
    return StopAutomaton(stops)


class StopMatcher:
    """Where one text stands in the automaton."""

    __slots__ = ("_automaton", "_state", "stop_index", "stop_length")

    def __init__(self, automaton: StopAutomaton) -> None:
        self._automaton = automaton
        self._state = 0
        self.stop_index = -1
        self.stop_length = 0

    @property
    def hold(self) -> int:
        """Characters at the end of the text so far that may be the beginning of a stop string."""
        return self._automaton.hold[self._state]

    def feed(self, text: str, armed: bool = True) -> int:
        """Characters of `text` up to the end of the first match, or -1. Unarmed, a match that ends here is no match."""
        automaton, state = self._automaton, self._state
        if not state and automaton.first.isdisjoint(text):
            return -1
        goto, fail, stop = automaton.goto, automaton.fail, automaton.stop
        for position, char in enumerate(text, 1):
            following = goto[state].get(char)
            while following is None and state:
                state = fail[state]
                following = goto[state].get(char)
            state = following or 0
            if armed and stop[state] >= 0:
                self._state = state
                self.stop_index, self.stop_length = stop[state], automaton.length[state]
                return position
        self._state = state
        return -1
