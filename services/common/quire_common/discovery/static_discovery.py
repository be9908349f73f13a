"""Peers from flags. They never change, and registration does nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire_common.config import split_address
from quire_common.discovery.closing import Closing
from quire_common.discovery.endpoint import Endpoint

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence


class StaticDiscovery:
    """Entries are `host:port` or `instance=host:port`. Raises ConfigError for anything else."""

    def __init__(self, static: Mapping[str, Sequence[str]]) -> None:
        self._closing = Closing()
        self._endpoints = {
            service: sorted((_parse(service, entry) for entry in entries), key=lambda endpoint: endpoint.instance)
            for service, entries in static.items()
        }

    async def watch(self, service: str) -> AsyncIterator[list[Endpoint]]:
        """Yield the flags' list, once; then wait until `close`."""
        yield list(self._endpoints.get(service, []))
        await self._closing.pause(None)

    async def register(self, endpoint: Endpoint) -> None:
        """Does nothing: the peers' own flags name this process."""

    async def close(self) -> None:
        """End the watchers."""
        self._closing.set()


def _parse(service: str, entry: str) -> Endpoint:
    """Parse an entry `host:port` or `instance=host:port`; without an instance, the address is its name. Raises
    ConfigError for an address of another form."""
    instance, _, address = entry.rpartition("=")
    split_address(address, f"an address of a {service}")
    return Endpoint(instance or address, service, address)
