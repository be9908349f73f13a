"""Endpoint: an instance of a service, as discovery finds it. Discovery: the interface of all implementations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@dataclass(frozen=True)
class Endpoint:
    """One instance of a service. Two endpoints are the same peer if their `instance` is equal; the address may
    differ."""

    instance: str
    service: str
    address: str
    metadata: Mapping[str, str] = field(default_factory=dict, hash=False)


class Discovery(Protocol):
    """Finds peers, and makes this process findable. Used from one event loop.

    If the source (Redis, DNS) is away, watchers keep the last list that they knew; only its freshness suffers.
    """

    def watch(self, service: str) -> AsyncIterator[list[Endpoint]]:
        """Yield the instances of a service, sorted by name: once at the start (perhaps none), then after every change.

        Ends when `close` is called. Never raises because the source is away.
        """
        ...

    async def register(self, endpoint: Endpoint) -> None:
        """Make an endpoint findable until `close`. Registering an instance again replaces its endpoint.

        Returns after the first attempt. If that attempt fails, further attempts follow in the background.
        """

    async def close(self) -> None:
        """Withdraw what was registered, if the source can be reached, and end all watchers."""
