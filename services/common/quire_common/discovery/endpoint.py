"""What discovery tells of a peer, and the contract of all ways of finding them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@dataclass(frozen=True)
class Endpoint:
    """One instance of a service. Two are the same peer if their `instance` is equal; the address may change."""

    instance: str
    service: str
    address: str
    metadata: Mapping[str, str] = field(default_factory=dict, hash=False)


class Discovery(Protocol):
    """Finds peers and makes this process findable. Used from one event loop.

    Losing the source of truth degrades freshness alone: watchers keep the last list that they knew.
    """

    def watch(self, service: str) -> AsyncIterator[list[Endpoint]]:
        """Yields the instances of a service, sorted by name: once now (maybe none), then at every change.

        Ends when `close` is called. Never raises because the source is away.
        """
        ...

    async def register(self, endpoint: Endpoint) -> None:
        """Make an endpoint findable until `close`; registering an instance again replaces what is said of it.

        Returns after the first attempt; where that failed, goes on trying in the background.
        """

    async def close(self) -> None:
        """Withdraw what was registered and end all watchers."""
