"""RepetitionTrack: how often the end of an output repeats itself, for all pattern sizes of a rule at once.

For each size s, RepetitionTrack keeps the run: the number of last tokens that equal the token s places before them. The
output ends with `min_count` copies of one pattern of s tokens exactly when the run is s * (min_count - 1) or more. A
new token either lengthens a run by one or resets it to zero. For all sizes together, this takes a few operations on
arrays of at most MAX_PATTERN_SIZE entries.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from quire_common.repetition import RepetitionDetection

    Int64 = NDArray[np.int64]

_NO_TOKEN = -1
_LEAST_BLOCK, _MOST_BLOCK = 64, 16_384


class RepetitionTrack:
    """Follows one output that begins with `tokens`. `repeats` asks about a possible next token; `add` appends a token
    to the output."""

    def __init__(self, rule: RepetitionDetection, tokens: Sequence[int]) -> None:
        self._most, least = rule.max_pattern_size, max(rule.min_pattern_size, 1)
        # All arrays by size go from the largest size to the smallest, as the tokens at these distances do.
        sizes = np.arange(self._most, least - 1, -1)
        self._needed: Int64 = sizes * (rule.min_count - 1)
        self._spread = self._most + 1 - least
        known = np.asarray(tokens, np.int64)
        self._run: Int64 = trailing_runs(known, self._most)[sizes]
        self._next: Int64 = np.empty_like(self._run)
        # The latest tokens, of which the last `_most` are of interest; they move to the front when it is full.
        self._recent: Int64 = np.full(4 * self._most + 256, _NO_TOKEN, np.int64)
        latest = known[-self._most :]
        self._end = self._most
        self._recent[self._end - len(latest) : self._end] = latest
        # The token for which `_next` was computed.
        self._asked = _NO_TOKEN

    def repeats(self, token: int) -> bool:
        """Whether the output would end with a repetition, for any pattern size of the rule, if this token followed. The
        output stays as it is."""
        self._extend(token)
        return bool((self._next >= self._needed).any())

    def add(self, token: int) -> None:
        """Append a token to the output, and update the runs of all sizes."""
        if token != self._asked:
            self._extend(token)
        self._run, self._next, self._asked = self._next, self._run, _NO_TOKEN
        if self._end == len(self._recent):
            self._recent[: self._most] = self._recent[-self._most :]
            self._end = self._most
        self._recent[self._end] = token
        self._end += 1

    def _extend(self, token: int) -> None:
        """Compute into `_next` what the runs of all sizes would be after this token: one more where it equals the token
        at this distance, else 0."""
        first = self._end - self._most
        np.add(self._run, 1, out=self._next)
        self._next *= self._recent[first : first + self._spread] == token
        self._asked = token


def trailing_runs(tokens: Int64, most: int) -> Int64:
    """Return, for each size 0..most, how many of the last tokens equal the token `size` places before them; 0 for size
    0. This is the Z-function of the reversed tokens (Gusfield, 1997), which needs as many comparisons as there are
    tokens."""
    reverse, count = tokens[::-1].copy(), len(tokens)
    runs: Int64 = np.zeros(most + 1, np.int64)
    # reverse[left:right] equals the beginning of `reverse`, as far to the right as any such part found so far.
    left = right = 0
    for size in range(1, min(most, count - 1) + 1):
        run = min(right - size, int(runs[size - left])) if size < right else 0
        if size + run >= right:
            run += _common_length(reverse[run:], reverse[size + run :])
            left, right = size, size + run
        runs[size] = run
    return runs


def _common_length(first: Int64, second: Int64) -> int:
    """Return the length of the longest beginning that both arrays have. They are compared in blocks of growing size."""
    end, at, block = min(len(first), len(second)), 0, _LEAST_BLOCK
    while at < end:
        stop = min(at + block, end)
        differ = first[at:stop] != second[at:stop]
        place = int(differ.argmax())
        if differ[place]:
            return at + place
        at, block = stop, min(2 * block, _MOST_BLOCK)
    return end
