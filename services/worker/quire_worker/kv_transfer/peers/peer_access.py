"""PeerAccess: the addresses at which a peer serves the pages of a pull, and the lease key that permits it."""

from __future__ import annotations

import contextlib
import functools
import re
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from quire_common.config import split_address
from quire_common.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from quire_common.credit import PageMove
    from quire_common.credit.hello import RankAddress
    from quire_common.errors import QuireError
    from quire_worker.kv_transfer.peers.peer_hosts import PeerHosts

TCP, SHM, CUDA_IPC, GRPC = "tcp", "shm", "cuda_ipc", "grpc"
SOCKET_PREFIX = "quire-worker-"
# The name comes from the wire: it leads to no socket but a worker's.
_SOCKET_NAME = re.compile(rf"{SOCKET_PREFIX}[0-9a-f]{{32}}")
# gRPC would take more than hosts and ports for an address, files among them.
_HOST = re.compile(r"[A-Za-z0-9._-]+|[0-9A-Fa-f:.]+(%[A-Za-z0-9]+)?")


@dataclass(frozen=True)
class PeerAccess:
    """The access of one pull. `tcp` and `grpc` are None, and `socket` is empty, if the peer cannot be reached in that
    way. `first_index` is the place of the pull's first page in the export."""

    key: bytes = field(repr=False)
    first_index: int
    tcp: tuple[str, int] | None
    socket: str
    memory: bool = False
    """Its pages lie in memory that this host's processes may open."""
    grpc: tuple[str, int] | None = None
    refusals: tuple[QuireError, ...] = ()
    """Why addresses that the ticket names are not dialled."""

    @property
    def route(self) -> tuple[tuple[str, int] | None, tuple[str, int] | None]:
        """The key under which the failure of a transport towards this peer is remembered."""
        return self.tcp, self.grpc

    @classmethod
    def from_move(cls, move: PageMove, hosts: PeerHosts) -> PeerAccess:
        """Read a pull's ticket: the addresses of the peer's rank 0, its lease key, and whether its memory can be
        opened, for which one descriptor of this host is enough. Of several TCP or gRPC addresses or sockets, the last
        decides, even if it is left out. Addresses that are malformed or that `hosts` refuses, and sockets of another
        host, are left out; `refusals` has the errors of all refused ones."""
        tcp, grpc, socket = None, None, ""
        refusals: list[QuireError] = []

        def allowed(text: str) -> tuple[str, int] | None:
            """Parse an address into host and port; None if it is malformed or `hosts` refuses it. A refusal is added to
            `refusals`."""
            place = _host_and_port(text)
            refusal = None if place is None else hosts.refusal(*place)
            if refusal is None:
                return place
            refusals.append(refusal)
            return None

        for address in rank_zero(move.source):
            text = address.descriptor.decode("ascii", "replace")
            if address.transport == TCP:
                tcp = allowed(text)
            elif address.transport == GRPC:
                grpc = allowed(text)
            elif address.transport == SHM:
                socket = _socket_here(text)
        return cls(move.lease_key, move.first_index, tcp, socket, bool(memory_of(move)), grpc, tuple(refusals))


def memory_of(move: PageMove) -> bytes:
    """The descriptor of the memory that holds a pull's pages; empty if the ticket names none on this host."""
    here = host_id()
    told = (address.descriptor for address in rank_zero(move.source) if address.transport == CUDA_IPC)
    return next((descriptor for descriptor in told if here and descriptor.endswith(here)), b"")


def rank_zero(addresses: Iterable[RankAddress]) -> list[RankAddress]:
    """Return the addresses of rank 0, a group's only rank."""
    return [address for address in addresses if address.rank == 0]


@functools.cache  # a process lives in one boot
def boot_id() -> str:
    """Return the kernel's boot id, which is unique to this host and this boot; empty if the system does not name it."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def neighbourhood() -> bytes:
    """Return an id of the host's boot and the network namespace. Processes with the same id find each other's abstract
    Unix sockets, and so each other's memory. Empty if the system does not name them."""
    boot = boot_id()
    try:
        namespace = Path("/proc/self/ns/net").readlink()
    except OSError:
        return b""
    return f"{boot}/{namespace}".encode() if boot else b""


def host_id() -> bytes:
    """The boot id as 16 bytes, with which descriptors of memory end; empty where the system does not say."""
    with contextlib.suppress(ValueError):
        return uuid.UUID(boot_id()).bytes
    return b""


def _host_and_port(text: str) -> tuple[str, int] | None:
    """Parse `host:port` into its two parts; None if the text is malformed or the host is neither a name nor an IP
    address."""
    try:
        host, port = split_address(text, "a ticket's address")
    except ConfigError:
        return None
    return (host, port) if _HOST.fullmatch(host) else None


def _socket_here(text: str) -> str:
    """The socket's name out of `host/name`; empty if it is malformed or of another host."""
    host, _, name = text.partition("/")
    return name if host and host == boot_id() and _SOCKET_NAME.fullmatch(name) else ""
