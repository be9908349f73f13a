"""Token buckets in memory. A bucket holds one minute's allowance, fills evenly, and may go into debt.

The arithmetic is the same as in the Redis script of `shared_buckets`. Callers pass the time; this module reads no
clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quire_router.principal import KeyLimits

MINUTE_S = 60.0


@dataclass(frozen=True, slots=True)
class Levels:
    """The numbers of requests and tokens that are left in a tenant's buckets; infinite if there is no limit."""

    requests: float
    tokens: float


UNLIMITED = Levels(float("inf"), float("inf"))


class Bucket:
    """One token bucket. `level` is the level at the time `at_s`; call `now` for the present level."""

    __slots__ = ("at_s", "level", "per_minute")

    def __init__(self, per_minute: int, now_s: float) -> None:
        self.per_minute = per_minute
        self.level = float(per_minute)
        self.at_s = now_s

    def now(self, now_s: float) -> float:
        """Refill the bucket evenly up to `now_s`, to one minute's allowance at most, and return its level. A time
        before the last one adds nothing. Returns infinity if there is no limit (`per_minute` is 0)."""
        if self.per_minute:
            passed_s = max(0.0, now_s - self.at_s)
            self.level = min(float(self.per_minute), self.level + passed_s * self.per_minute / MINUTE_S)
        self.at_s = max(self.at_s, now_s)
        return self.level if self.per_minute else float("inf")

    def set(self, level: float, now_s: float) -> None:
        """Set the level to that of the shared bucket, but to one minute's allowance at most. With a time before the
        last one, the bucket keeps its own time: otherwise `now` would add the seconds between them again."""
        self.level, self.at_s = min(float(self.per_minute), level), max(self.at_s, now_s)

    def resize(self, per_minute: int, now_s: float) -> None:
        """Change the limit. The level stays, but it is one minute's allowance at most, and is this if there was no
        limit."""
        level = self.now(now_s)
        self.per_minute = per_minute
        self.set(level, now_s)


class TenantBuckets:
    """The two buckets of a tenant: one for requests, one for tokens."""

    def __init__(self, limits: KeyLimits, now_s: float) -> None:
        self.requests = Bucket(limits.requests_per_minute, now_s)
        self.tokens = Bucket(limits.tokens_per_minute, now_s)

    def levels(self, now_s: float) -> Levels:
        """Update both buckets to `now_s`, and return their levels."""
        return Levels(self.requests.now(now_s), self.tokens.now(now_s))

    def admit(self, now_s: float) -> bool:
        """Refill both buckets, then take one request if each limited bucket has at least 1. Returns False, and takes
        nothing, otherwise. Tokens are only checked here; `charge` subtracts them."""
        levels = self.levels(now_s)
        if levels.requests < 1 or levels.tokens < 1:
            return False
        self.requests.level -= 1
        return True

    def charge(self, tokens: int, now_s: float) -> None:
        """Refill the token bucket, then subtract tokens; the level may become negative. A negative `tokens` gives
        tokens back."""
        self.tokens.now(now_s)
        self.tokens.level -= tokens

    def set(self, levels: Levels, now_s: float) -> None:
        """Set the levels to those of the shared buckets."""
        self.requests.set(levels.requests, now_s)
        self.tokens.set(levels.tokens, now_s)

    def resize(self, limits: KeyLimits, now_s: float) -> None:
        """Change the limits of both buckets."""
        self.requests.resize(limits.requests_per_minute, now_s)
        self.tokens.resize(limits.tokens_per_minute, now_s)
