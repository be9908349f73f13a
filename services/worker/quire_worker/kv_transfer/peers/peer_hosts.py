"""PeerHosts: the addresses to which this worker may open connections for pages. Tickets name addresses, and tickets
come from outside.

So each address of a ticket is compared with this worker's own configuration before any connection is made. A host name
is compared as a name; it is not resolved to see whether it lies in a network.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire_common.config import split_address
from quire_common.errors import ConfigError, PermissionDenied
from quire_common.identity.exposure import is_loopback

if TYPE_CHECKING:
    from collections.abc import Iterable

    from quire_common.credit.hello import RankAddress
    from quire_worker.config import WorkerConfig

_ENTRY = re.compile(r"(?P<host>\[[^\]]+\]|[^:\s]+|[0-9A-Fa-f:.]*:[0-9A-Fa-f:./]*:[0-9A-Fa-f:./]*)(:(?P<port>\d{1,5}))?")
_NAME = re.compile(r"(\*\.)?[A-Za-z0-9._-]+")
_ANY_SUBDOMAIN = "*."
# No host has them; dialled, an address of all of a host's own means the dialling host itself.
_UNSPECIFIED_HOSTS = {"", "0.0.0.0", "::"}


@dataclass(frozen=True, slots=True)
class _Entry:
    """One entry of the list: a network or a name. Port 0 stands for all ports."""

    network: ipaddress.IPv4Network | ipaddress.IPv6Network | None
    name: str
    port: int

    def covers(self, host: str, port: int) -> bool:
        """Whether this entry permits the address. A network permits literal addresses in it, `*.domain` all names below
        the domain, another name itself; capital and small letters are the same. A port of the entry must be equal."""
        if self.port not in (0, port):
            return False
        if self.network is not None:
            address = _address(host)
            return address is not None and address in self.network
        if self.name.startswith(_ANY_SUBDOMAIN):
            return host.lower().endswith(self.name[1:])
        return host.lower() == self.name


class PeerHosts:
    """The parsed entries of --peer-hosts. Raises ConfigError for an invalid entry."""

    def __init__(self, entries: Iterable[str]) -> None:
        self._entries = [_parse(entry) for entry in entries]

    def refusal(self, host: str, port: int) -> PermissionDenied | None:
        """Return the error PEER_NOT_ALLOWED if no entry covers this address, so that this worker must not connect to
        it; None if it may."""
        if any(entry.covers(host, port) for entry in self._entries):
            return None
        return PermissionDenied(
            "PEER_NOT_ALLOWED",
            f"A ticket names {host}:{port}, which is not the address of a worker that this worker knows.",
            "If a worker serves pages there, add its host to --peer-hosts of the workers that pull.",
        )


def peer_hosts(config: WorkerConfig, own: Iterable[RankAddress]) -> tuple[str, ...]:
    """Return the entries of --peer-hosts. Without the option: this host alone, by the names that this worker has for it
    in its flags and its `own` addresses, without wildcards. If one of these is a loopback name, all loopback addresses
    are added. Raises ConfigError for an invalid entry of the option, or a malformed address in the flags."""
    if config.peer_hosts:
        PeerHosts(config.peer_hosts)  # what is wrong with them is to end the start, not every pull
        return config.peer_hosts
    told = [config.listen, config.advertise, *(a.descriptor.decode() for a in own if a.transport in ("tcp", "grpc"))]
    hosts = {config.peer_advertise, *(split_address(address, "an address")[0] for address in told if address)}
    hosts -= _UNSPECIFIED_HOSTS
    if any(map(is_loopback, hosts)):
        hosts |= {"127.0.0.0/8", "::1", "localhost"}
    return tuple(sorted(hosts))


def _parse(text: str) -> _Entry:
    """Parse an entry: an address, a network, a name or `*.domain`, each with a port or without. Raises ConfigError for
    any other text, such as a network with bits beyond its prefix (10.0.0.1/24), and for a port above 65535."""
    found = _ENTRY.fullmatch(text.strip())
    if found is not None and (port := int(found["port"] or 0)) <= 65535:
        host = found["host"].strip("[]")
        try:
            return _Entry(ipaddress.ip_network(host), "", port)
        except ValueError:
            if "/" not in host and _NAME.fullmatch(host):
                return _Entry(None, host.lower(), port)
    raise ConfigError(
        "BAD_VALUE",
        f"--peer-hosts has the entry {text!r}, which names no hosts.",
        "Write addresses, networks (10.0.0.0/24), names or *.domain, each with a port or without, with commas between.",
        param="peer_hosts",
    )


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Read a literal IP address. An IPv4 address that is mapped into IPv6 is returned as IPv4. None for names."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address
