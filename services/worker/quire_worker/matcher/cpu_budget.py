"""CpuBudget: limits the processor time that the masks of one sequence may take.

llguidance limits states and items, but not time. An ambiguous grammar within these limits can take a second for one
mask; others take some tenths of a millisecond. So a sequence has a limit for each token, and one for the average. Time
in which a thread waits for a processor does not count.
"""

from __future__ import annotations

import math
from typing import Final

from quire_worker.matcher.guidance_backend import GrammarError

# The slowest of 190 schemas, expressions and grammars took 3 ms for a token. One of 130 tools took 0.8 ms on average.
TOKEN_NS: Final = 100_000_000
"""The most for one token."""
AVERAGE_NS: Final = 5_000_000
"""The most per token on average, beyond BURST_NS."""
BURST_NS: Final = 2_000_000_000
"""The time that a sequence may take above the average, as in a token bucket of this size."""


class GrammarTooSlow(GrammarError):  # the name says that it is an error; it ends one sequence
    """A grammar whose masks take too much processor time."""


class CpuBudget:
    """The processor time that one sequence has left, as a token bucket. Belongs to the thread that works on the
    sequence."""

    def __init__(self) -> None:
        self._left_ns = BURST_NS
        self.last_ns = 0
        """The processor time of the last `charge`."""

    def charge(self, spent_ns: int, tokens: int) -> None:
        """Add AVERAGE_NS per token to the budget, and subtract the processor time of these tokens and of the mask after
        them; the budget is at most BURST_NS. Keeps `spent_ns` as `last_ns`, by which slow sequences change threads.
        Raises GrammarTooSlow if that took more than TOKEN_NS per token, or the budget is used up."""
        self.last_ns = spent_ns
        self._left_ns = min(self._left_ns + AVERAGE_NS * tokens - spent_ns, BURST_NS)
        token_ns = spent_ns / max(tokens, 1)
        if token_ns > TOKEN_NS:
            raise GrammarTooSlow(
                f"one token took {math.ceil(token_ns / 1e6)} ms of processor time, at most {TOKEN_NS // 1_000_000} ms "
                "are possible"
            )
        if self._left_ns < 0:
            raise GrammarTooSlow(f"its tokens take more than {AVERAGE_NS // 1_000_000} ms of processor time on average")
