"""The registry of transports: those that carry pages to and from a kvstore, and those that carry pages between workers.

Flags, metrics, listeners and the order of preference derive from the registry. The class of a transport is imported
when the transport is made, so the engine and its configuration load no transport's code.
"""

from __future__ import annotations

import enum
import importlib.util
from dataclasses import dataclass
from typing import Any

AUTO = "auto"
"""The choice of a flag that leaves all transports open but those that are used by name alone."""


class Traffic(enum.Enum):
    """The two kinds of traffic: pages of a kvstore, and pages of peers."""

    STORE = "store"
    PEER = "peer"


class PeerSocket(enum.Enum):
    """A socket on which a worker awaits its peers."""

    UNIX = "unix"
    TCP = "tcp"
    GRPC = "grpc"


@dataclass(frozen=True, slots=True)
class TransportEntry:
    """`name` is the flag's choice and the metrics' label. The class `class_name` of `module`, beside this one, has a
    class method `make`, which takes a StoreEnd or a PullEnd."""

    name: str
    traffic: Traffic
    module: str
    class_name: str
    in_auto: bool = True
    """Whether `auto` may choose it."""
    needs_keys: bool = True
    """Whether its frames are authenticated, which takes the package cryptography."""
    sockets: frozenset[PeerSocket] = frozenset()
    """Where peers come in that use it; any of them will do."""
    package: str = ""
    """A package beyond the worker's own dependencies."""

    def make(self, end: Any) -> Any:
        """Import the transport's class, and return its instance: a Transport for a StoreEnd, or a FetchTransport for a
        PullEnd."""
        module = importlib.import_module(f"{__package__}.{self.module}")
        return getattr(module, self.class_name).make(end)


# In order of preference: the fastest first.
TRANSPORTS = (
    TransportEntry("shm", Traffic.STORE, "shm_transport", "ShmTransport"),
    TransportEntry("tcp", Traffic.STORE, "tcp_transport", "TcpTransport"),
    TransportEntry("grpc", Traffic.STORE, "grpc_transport", "GrpcTransport", needs_keys=False),
    TransportEntry(
        "cuda_ipc", Traffic.PEER, "peer_cuda", "PeerCuda", sockets=frozenset({PeerSocket.UNIX, PeerSocket.TCP})
    ),
    TransportEntry("shm", Traffic.PEER, "peer_shm", "PeerShm", sockets=frozenset({PeerSocket.UNIX})),
    TransportEntry("tcp", Traffic.PEER, "peer_tcp", "PeerTcp", sockets=frozenset({PeerSocket.TCP})),
    TransportEntry("grpc", Traffic.PEER, "peer_grpc", "PeerGrpc", sockets=frozenset({PeerSocket.GRPC})),
    TransportEntry(
        "nixl",
        Traffic.PEER,
        "peer_nixl",
        "PeerNixl",
        in_auto=False,
        sockets=frozenset({PeerSocket.TCP}),
        package="nixl",
    ),
)


def entries(traffic: Traffic, choice: str = "") -> list[TransportEntry]:
    """Return all transports of that traffic, or those that a flag's choice leaves open, in order of preference. `auto`
    leaves all open but those that are used by name alone."""
    return [
        entry
        for entry in TRANSPORTS
        if entry.traffic is traffic and (not choice or choice == entry.name or (choice == AUTO and entry.in_auto))
    ]


def names(traffic: Traffic) -> tuple[str, ...]:
    """The names of all transports of that traffic, in order of preference."""
    return tuple(entry.name for entry in entries(traffic))


def choices(traffic: Traffic) -> tuple[str, ...]:
    """Return the values that a flag accepts."""
    return (AUTO, *names(traffic))


def peer_sockets(choice: str) -> frozenset[PeerSocket]:
    """Return the sockets that this worker must open, so that peers come in by the transports that a choice leaves
    open."""
    return frozenset[PeerSocket]().union(*(entry.sockets for entry in entries(Traffic.PEER, choice)))


def missing_package(choice: str) -> str:
    """Return the package beyond the worker's own dependencies that a chosen transport between workers needs and that is
    not installed; empty if there is none."""
    needed = (entry.package for entry in entries(Traffic.PEER, choice) if entry.package)
    return next((package for package in needed if importlib.util.find_spec(package) is None), "")
