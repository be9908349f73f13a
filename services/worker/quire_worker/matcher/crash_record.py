"""CrashRecord: counts the crashes of the matcher's process, by the work that caused them.

The text of a grammar and the sampled tokens determine what the process does for a sequence. A digest of both is the
*replay key* of the sequence. Sequences with the same replay key crash the process all, or none does. So the record
counts crashes per replay key, and not per request.

A process may also crash while it computes masks ahead of the sampled tokens, so that the replay key says nothing of the
cause. Therefore no masks are computed ahead for a grammar on which a lost process worked.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

import xxhash

if TYPE_CHECKING:
    from collections.abc import Callable

MOST_CRASHES = 2
# Then a refusal ends: the machine may have killed the process, and not the grammar.
REFUSED_S = 600.0
_MOST_KEYS = 256


class CrashRecord:
    """Counts the crashes of one process. Belongs to the model thread. Of suspect keys, of refused keys and of grammars
    without lookahead, only the last 256 are remembered."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._crashes: OrderedDict[bytes, int] = OrderedDict()
        self._refused_until_s: OrderedDict[bytes, float] = OrderedDict()
        self._without_lookahead: OrderedDict[bytes, int] = OrderedDict()

    def __bool__(self) -> bool:
        """Whether any replay key is suspect or was refused. A refusal whose time is over counts until `is_refused`
        drops it."""
        return bool(self._crashes or self._refused_until_s)

    def for_another_process(self) -> CrashRecord:
        """Return a record for another process. Both records refuse the same work, and forbid lookahead to the same
        grammars, but each counts only the crashes of its own process. Otherwise one event that ends several processes
        at once would count as several crashes of the grammar on which all of them worked."""
        other = CrashRecord(self._clock)
        other._refused_until_s, other._without_lookahead = self._refused_until_s, self._without_lookahead
        return other

    def forbid_lookahead(self, grammar: str) -> None:
        """Record that a lost process worked on a sequence with this grammar."""
        self._without_lookahead[_digest(grammar)] = 1
        _drop_oldest(self._without_lookahead)

    def allows_lookahead(self, grammar: str) -> bool:
        """Whether masks of this grammar may be computed ahead."""
        return not self._without_lookahead or _digest(grammar) not in self._without_lookahead

    def add_crash(self, replay_key: bytes) -> None:
        """Count the crash of a process that worked on this replay key alone, which makes the key suspect. After
        MOST_CRASHES, the key is refused for REFUSED_S instead."""
        crashes = self._crashes.pop(replay_key, 0) + 1
        if crashes < MOST_CRASHES:
            self._crashes[replay_key] = crashes
            _drop_oldest(self._crashes)
        else:
            self._refused_until_s[replay_key] = self._clock() + REFUSED_S
            self._refused_until_s.move_to_end(replay_key)
            _drop_oldest(self._refused_until_s)

    def add_success(self, replay_key: bytes) -> None:
        """Record that a process completed this work: its crashes no longer count."""
        self._crashes.pop(replay_key, None)

    def is_suspect(self, replay_key: bytes) -> bool:
        """Whether a process crashed while it worked on this replay key alone, and none has completed it since. False
        for a refused key."""
        return replay_key in self._crashes

    def is_refused(self, replay_key: bytes) -> bool:
        """Whether work with this replay key is refused: it crashed one process (or another one that shares the
        refusals) MOST_CRASHES times without a success between, the last time less than REFUSED_S ago."""
        now_s = self._clock()
        while self._refused_until_s and next(iter(self._refused_until_s.values())) <= now_s:
            self._refused_until_s.popitem(last=False)
        return replay_key in self._refused_until_s


def _digest(grammar: str) -> bytes:
    return xxhash.xxh3_128_digest(grammar.encode())


def _drop_oldest(keys: OrderedDict[bytes, int] | OrderedDict[bytes, float]) -> None:
    """Forget the oldest keys, so that at most _MOST_KEYS stay."""
    while len(keys) > _MOST_KEYS:
        keys.popitem(last=False)
