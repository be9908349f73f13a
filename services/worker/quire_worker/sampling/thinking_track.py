"""ThinkingTrack: whether a sequence is thinking, and the token that it must sample when its budget is spent.

All is a function of prompt ids, output ids and budget, so an answer survives preemption and migration:

    thinking   a start mark came, and no end mark since. Of the prompt, whose earlier turns may have been cut short, the
               last start mark counts; within thinking, the output's are tokens like any other, lest a model lengthen
               its own budget
    spent      tokens since the start mark; those of an end mark in the making count like the others
    forced     once all are spent, the end mark's next token: the first that its longest beginning, with which the
               tokens since the start mark end, does not have yet
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable

    from quire_common.thinking import ThinkingBudget
    from quire_worker.arrays import Int32


class ThinkingTrack:
    """Follows the tokens of one sequence. `fed` adds each sampled token."""

    def __init__(self, budget: ThinkingBudget, prompt_ids: Int32, output: Iterable[int]) -> None:
        self.spent = -1
        """-1: not thinking."""
        self.started = self.ended = 0
        """Tokens of the mark that is looked for with which the sequence ends."""
        self._start, self._end, self._most = budget.start_ids, budget.end_ids, budget.max_tokens
        self._start_back, self._end_back = fallbacks(self._start), fallbacks(self._end)
        begun = _end_of_last(self._start, prompt_ids)
        if begun:
            self.spent = 0
        for token in prompt_ids[begun or -len(self._start) :].tolist():
            self.fed(token)
        for token in output:
            self.fed(token)

    def fed(self, token: int) -> None:
        """Take in one more token of the sequence. Outside thinking, look for the start mark, which begins thinking with
        0 tokens spent. Within it, count the token and look for the end mark, which ends thinking."""
        if self.spent < 0:
            self.started = advance(self._start, self._start_back, self.started, token)
            if self.started == len(self._start):
                self.spent, self.started = 0, 0
            return
        self.spent += 1
        self.ended = advance(self._end, self._end_back, self.ended, token)
        if self.ended == len(self._end):
            self.spent, self.ended = -1, 0

    def forced(self) -> int | None:
        """Return the only token that may be sampled; None: any token."""
        return self._end[self.ended] if self.spent >= self._most else None


def fallbacks(mark: tuple[int, ...]) -> tuple[int, ...]:
    """Return the failure function of Knuth, Morris and Pratt: for each beginning of the mark, the length of the longest
    shorter beginning with which it ends."""
    back, matched = [0] * len(mark), 0
    for place in range(1, len(mark)):
        matched = advance(mark, tuple(back), matched, mark[place])
        back[place] = matched
    return tuple(back)


def advance(mark: tuple[int, ...], back: tuple[int, ...], matched: int, token: int) -> int:
    """Return how many of the mark's first tokens a sequence ends with after `token` (Knuth, Morris and Pratt).
    `matched` is this number before it, and less than the whole mark; `back` is the result of `fallbacks`."""
    while matched and mark[matched] != token:
        matched = back[matched - 1]
    return matched + (mark[matched] == token)


def _end_of_last(mark: tuple[int, ...], ids: Int32) -> int:
    """Return the index after the last such mark in `ids`; 0: there is none."""
    places = len(ids) - len(mark) + 1
    if places < 1:
        return 0
    same = np.ones(places, np.bool_)
    for offset, token in enumerate(mark):
        same &= ids[offset : offset + places] == token
    found = np.flatnonzero(same)
    return int(found[-1]) + len(mark) if len(found) else 0
