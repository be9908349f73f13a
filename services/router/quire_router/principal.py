"""Principal: the caller behind an API key, with its name and tenant, its scopes and its limits. This module knows no
key."""

from __future__ import annotations

from dataclasses import dataclass

from quire_common.request_parameters import MAX_INT32

INFERENCE, METRICS, ADMIN = "inference", "metrics", "admin"
SCOPES = (INFERENCE, METRICS, ADMIN)
# What a key has that says nothing of scopes: everything that the public port serves.
DEFAULT_SCOPES = frozenset({INFERENCE, METRICS})
# The greatest limit. Buckets are float64, which counts one by one far beyond it.
MOST_PER_MINUTE = 10**12
MOST_CONCURRENT = 10**6
MOST_MIB = 2**20


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """The limits of a key. 0 or empty means no limit, except for `weight` and `highest_priority`. `weight` is the key's
    share of each engine, relative to the shares of other keys.

    `max_concurrent` counts sequences in progress. `highest_priority` is the lowest number, since lower numbers run
    first. A request that asks for a lower number gets this one. `kept_responses_mib` counts stored responses.
    """

    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    weight: int = 1
    models: tuple[str, ...] = ()
    """The names of the only models that the key may ask for; empty: all."""
    max_concurrent: int = 0
    highest_priority: int = -MAX_INT32
    kept_responses_mib: int = 0

    @property
    def counted(self) -> bool:
        """Whether all routers must count the usage of the key together."""
        return self.per_minute or bool(self.max_concurrent)

    @property
    def per_minute(self) -> bool:
        """Whether requests or tokens per minute are limited."""
        return bool(self.requests_per_minute or self.tokens_per_minute)

    def allow_model(self, name: str) -> bool:
        """Whether the key may ask for the model of this name."""
        return not self.models or name in self.models


NO_LIMITS = KeyLimits()


@dataclass(frozen=True, slots=True)
class Principal:
    """The caller. `tenant` names caches, queues and limits. Two keys of one name are one tenant, so that keys can be
    renewed."""

    tenant: str = ""
    name: str = ""
    scopes: frozenset[str] = frozenset(SCOPES)
    limits: KeyLimits = NO_LIMITS

    @property
    def tenant_name(self) -> str:
        """Return the name of the tenant for people and metrics: the name of its keys, or the tenant itself if they have
        none."""
        return self.name or self.tenant
