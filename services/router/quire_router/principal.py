"""Who asks, and what they may: the name and tenant behind an API key, its scopes and its limits. Knows no key."""

from __future__ import annotations

from dataclasses import dataclass, field

INFERENCE, METRICS, ADMIN = "inference", "metrics", "admin"
SCOPES = (INFERENCE, METRICS, ADMIN)
# What a key has that says nothing of scopes: everything that the public port serves.
DEFAULT_SCOPES = frozenset({INFERENCE, METRICS})
# The greatest limit. Buckets are float64, which counts one by one far beyond it.
MOST_PER_MINUTE = 10**12


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """Per minute; 0: no limit."""

    requests_per_minute: int = 0
    tokens_per_minute: int = 0

    def __bool__(self) -> bool:
        return bool(self.requests_per_minute or self.tokens_per_minute)


@dataclass(frozen=True, slots=True)
class Principal:
    """`tenant` names caches, queues and limits. Two keys of one name are one tenant, so that keys can be renewed."""

    tenant: str = ""
    name: str = ""
    scopes: frozenset[str] = frozenset(SCOPES)
    limits: KeyLimits = field(default_factory=KeyLimits)
