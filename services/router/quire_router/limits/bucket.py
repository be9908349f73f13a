"""Token buckets in memory. A bucket holds one minute's allowance, fills evenly, and may go into debt.

The same arithmetic as the script of `shared_buckets`, its twin in Redis. Knows no clock: callers tell the time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quire_router.principal import KeyLimits

MINUTE_S = 60.0


@dataclass(frozen=True, slots=True)
class Levels:
    """What is left in a tenant's buckets; infinite where there is no limit."""

    requests: float
    tokens: float


UNLIMITED = Levels(float("inf"), float("inf"))


class Bucket:
    """`level` was right at `at_s`; use `now`."""

    __slots__ = ("at_s", "level", "per_minute")

    def __init__(self, per_minute: int, now_s: float) -> None:
        self.per_minute = per_minute
        self.level = float(per_minute)
        self.at_s = now_s

    def now(self, now_s: float) -> float:
        """Fill the bucket up to `now_s` and return its level; infinite where there is no limit."""
        if self.per_minute:
            passed_s = max(0.0, now_s - self.at_s)
            self.level = min(float(self.per_minute), self.level + passed_s * self.per_minute / MINUTE_S)
        self.at_s = max(self.at_s, now_s)
        return self.level if self.per_minute else float("inf")

    def set(self, level: float, now_s: float) -> None:
        """Set the level that the shared bucket has, to a minute's allowance at most."""
        self.level, self.at_s = min(float(self.per_minute), level), now_s


class TenantBuckets:
    """The two buckets of a tenant."""

    def __init__(self, limits: KeyLimits, now_s: float) -> None:
        self.requests = Bucket(limits.requests_per_minute, now_s)
        self.tokens = Bucket(limits.tokens_per_minute, now_s)

    def levels(self, now_s: float) -> Levels:
        """Fill both buckets and return their levels."""
        return Levels(self.requests.now(now_s), self.tokens.now(now_s))

    def admit(self, now_s: float) -> bool:
        """Take one request, if one is left and the tokens are not in debt. Returns whether it was taken."""
        levels = self.levels(now_s)
        if levels.requests < 1 or levels.tokens < 1:
            return False
        self.requests.level -= 1
        return True

    def charge(self, tokens: int, now_s: float) -> None:
        """Take tokens, into debt if need be; give them back where `tokens` is negative."""
        self.tokens.now(now_s)
        self.tokens.level -= tokens

    def set(self, levels: Levels, now_s: float) -> None:
        """Set the levels that the shared buckets have."""
        self.requests.set(levels.requests, now_s)
        self.tokens.set(levels.tokens, now_s)
