"""Peers from DNS: every address of a name is an instance (a headless service of Kubernetes, a Compose service)."""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING

from quire_common.config import split_address
from quire_common.discovery.closing import Closing
from quire_common.discovery.endpoint import Endpoint
from quire_common.errors import ConfigError
from quire_common.telemetry.logs import get_logger

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

log = get_logger(__name__)
POLL_S = 5.0


class DnsDiscovery:
    """Entries are `name:port`. Resolves them again every `poll_s`; a name that fails keeps its last addresses. Raises
    ConfigError for an entry of another form."""

    def __init__(self, names: Mapping[str, Sequence[str]], poll_s: float = POLL_S) -> None:
        self._names = {service: [_parse(service, entry) for entry in entries] for service, entries in names.items()}
        self._poll_s = poll_s
        self._closing = Closing()

    async def watch(self, service: str) -> AsyncIterator[list[Endpoint]]:
        """Yield an endpoint for each address of the service's names, after the first look-ups and after every change,
        until `close`. The list is empty if there is no name or none has ever resolved. Names are resolved every
        `poll_s`; a name that does not resolve is logged each time and keeps its last addresses. An instance is named by
        its address; `metadata["host"]` is the DNS name, which certificates carry. An address of two names is listed
        twice."""
        last: dict[tuple[str, int], list[Endpoint]] = {}
        shown: list[Endpoint] | None = None
        while not self._closing.done:
            for host, port in self._names.get(service, []):
                before = last.get((host, port), [])
                try:
                    last[host, port] = await _resolve(service, host, port)
                except OSError as error:
                    log.warning("a name does not resolve", host=host, reason=str(error), kept=len(before))
            found = sorted((e for endpoints in last.values() for e in endpoints), key=lambda e: e.instance)
            if found != shown:
                shown = found
                yield list(found)
            await self._closing.pause(self._poll_s)

    async def register(self, endpoint: Endpoint) -> None:
        """Does nothing: the platform maintains the DNS names."""

    async def close(self) -> None:
        """End the watchers."""
        self._closing.set()


def _parse(service: str, entry: str) -> tuple[str, int]:
    """Split an entry into name and port. Raises ConfigError for an entry of another form, and for a name that no
    resolver takes, such as one with an empty label or one of more than 63 characters."""
    host, port = split_address(entry, f"an address of a {service}")
    try:
        host.encode("idna")
    except UnicodeError as error:
        raise ConfigError(
            "BAD_ADDRESS",
            f"The host in {entry!r}, an address of a {service}, is no DNS name: {error}.",
            "Write a name whose labels between dots have 1 to 63 characters.",
        ) from None
    return host, port


async def _resolve(service: str, host: str, port: int) -> list[Endpoint]:
    """Resolve a name to one endpoint for each of its addresses, IPv4 and IPv6, sorted. The instance is named by the
    address `ip:port`, and `metadata["host"]` is the name. Raises OSError if the name does not resolve."""
    results = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    addresses = {
        f"[{address[0]}]:{port}" if family == socket.AF_INET6 else f"{address[0]}:{port}"
        for family, _, _, _, address in results
    }
    return [Endpoint(address, service, address, {"host": host}) for address in sorted(addresses)]
