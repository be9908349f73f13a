"""CrashRecord: which grammars ended the matcher's process.

The process's work for a sequence is a function of its grammar's text and of the tokens that it has sampled. Sequences
that agree in both are in one *state*, and all of them end the process, or none does. So the record counts crashes by
state, however many requests are in it. It knows nothing of seats.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

MOST_CRASHES = 2
# A refusal ends after so long: the machine may have ended the process, and not the grammar.
REFUSED_S = 600.0
_MOST_KEYS = 256


class CrashRecord:
    """Belongs to the model thread. Keeps the states of the last crashes, those that crashed longest ago go first."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._crashes: OrderedDict[bytes, int] = OrderedDict()
        self._refused_until_s: OrderedDict[bytes, float] = OrderedDict()

    def __bool__(self) -> bool:
        """Whether any state is suspect or refused."""
        return bool(self._crashes or self._refused_until_s)

    def add_crash(self, replay_key: bytes) -> None:
        """Count the end of a process that worked on this state alone. With MOST_CRASHES of them it is refused."""
        crashes = self._crashes.pop(replay_key, 0) + 1
        if crashes < MOST_CRASHES:
            self._crashes[replay_key] = crashes
            _bound(self._crashes)
        else:
            self._refused_until_s[replay_key] = self._clock() + REFUSED_S
            self._refused_until_s.move_to_end(replay_key)
            _bound(self._refused_until_s)

    def add_success(self, replay_key: bytes) -> None:
        """Note that a process got through this state: its crashes count no longer."""
        self._crashes.pop(replay_key, None)

    def is_suspect(self, replay_key: bytes) -> bool:
        """Whether a process ended while it worked on this state alone, and none has got through it since."""
        return replay_key in self._crashes

    def is_refused(self, replay_key: bytes) -> bool:
        """Whether the state has ended too many processes, and not too long ago."""
        now_s = self._clock()
        while self._refused_until_s and next(iter(self._refused_until_s.values())) <= now_s:
            self._refused_until_s.popitem(last=False)
        return replay_key in self._refused_until_s


def _bound(replay_keys: OrderedDict[bytes, int] | OrderedDict[bytes, float]) -> None:
    """Forget the oldest states, beyond the number that is kept."""
    while len(replay_keys) > _MOST_KEYS:
        replay_keys.popitem(last=False)
