"""PeerListeners: the sockets on which peers come in. The engine binds and keeps them, and each agent process inherits
them, so that the addresses that tickets name hold as long as the worker lives. A gRPC server listens on none but its
own: for that one the engine keeps a socket that never listens, and each process binds another to the same port.

The Unix socket is abstract, with a random name: there is nothing in the file system that could be left behind, and only
processes of the same host (of the same network namespace) find it.
"""

from __future__ import annotations

import errno
import secrets
import socket
from typing import TYPE_CHECKING

from quire_common.config import join_address, split_address
from quire_common.credit import MoveKind, RankAddress
from quire_common.errors import ConfigError
from quire_common.identity.exposure import require_private
from quire_common.kv_data.seal import AVAILABLE
from quire_common.serving.listen_errors import SHORTAGE_FIXES
from quire_common.telemetry.logs import get_logger
from quire_worker.kv_transfer.peers.peer_access import CUDA_IPC, GRPC, SHM, SOCKET_PREFIX, TCP, boot_id, neighbourhood
from quire_worker.kv_transfer.peers.peer_hosts import peer_hosts
from quire_worker.kv_transfer.setup import PEER_KINDS
from quire_worker.kv_transfer.transports.registry import AUTO, PeerSocket, missing_package, peer_sockets

if TYPE_CHECKING:
    from collections.abc import Callable

    from quire_worker.config import WorkerConfig

    Make = Callable[[str, int, socket.AddressFamily], socket.socket]

log = get_logger(__name__)
OFF = "off"
_ANY_HOST = ("0.0.0.0", "::")
# These addresses belong to networks for documentation, so no host has them.
_ELSEWHERE = {socket.AF_INET: ("192.0.2.1", 9), socket.AF_INET6: ("2001:db8::1", 9)}
# All pulls of another worker may begin at once.
_BACKLOG = 256


class PeerListeners:
    """Opens the sockets at once, but none if --peer-listen is off, or if the package cryptography is missing, which is
    logged. `addresses` go into the worker's hello. Raises ConfigError if a port cannot be opened, --peer-hosts has an
    invalid entry, the transport's package is missing, or gRPC would listen without TLS on a host that is not
    private."""

    def __init__(self, config: WorkerConfig) -> None:
        self.addresses: tuple[RankAddress, ...] = ()
        self.grpc_listen = ""
        """The address on which the KV transfer agent serves gRPC; empty: none."""
        self.host = neighbourhood()
        """Equal where workers reach each other's memory."""
        self._sockets: dict[str, socket.socket] = {}
        self._reserved: socket.socket | None = None
        self.peer_hosts: tuple[str, ...] = peer_hosts(config, ())
        """The addresses that pulls may dial, as entries of PeerHosts."""
        self._transport = config.peer_transport
        if package := missing_package(config.peer_transport):
            raise ConfigError(
                "NIXL_MISSING",
                f"--peer-transport {config.peer_transport} needs a package that is not installed.",
                f"Install quire-worker[{package}], or take another transport.",
                param="peer_transport",
            )
        if config.peer_listen == OFF:
            return
        if not AVAILABLE:
            log.warning("no pages go from worker to worker: the package cryptography is not installed")
            return
        needed = peer_sockets(config.peer_transport)
        if PeerSocket.UNIX in needed:
            self._open_unix()
        if PeerSocket.TCP in needed:
            self._open_tcp(config)
        if PeerSocket.GRPC in needed and config.peer_grpc_listen != OFF:
            self._reserve_grpc(config)
        self.peer_hosts = peer_hosts(config, self.addresses)

    @property
    def kinds(self) -> frozenset[MoveKind]:
        """The kinds of moves that are possible. There are none if the package for keys is missing, and only pulls if no
        address is advertised, since no peer can reach an export then."""
        if not AVAILABLE:
            return frozenset()
        return PEER_KINDS if self.addresses else frozenset({MoveKind.PULL})

    @property
    def inherited_fds(self) -> dict[str, int]:
        """Descriptors for the KV transfer agent's process, by the flags that name them."""
        return {flag: sock.fileno() for flag, sock in self._sockets.items()}

    def advertise_memory(self, descriptor: bytes) -> bool:
        """Put the descriptor of this worker's GPU memory before the addresses, so that peers of this host may open it.
        Returns False, and does nothing, if it is empty, there are no other addresses, or --peer-transport is neither
        `auto` nor `cuda_ipc`."""
        if descriptor and self.addresses and self._transport in (AUTO, CUDA_IPC):
            self.addresses = (RankAddress(0, CUDA_IPC, descriptor), *self.addresses)
            return True
        return False

    def close(self) -> None:
        """Close the sockets and give up the reserved port. An agent process that still runs has inherited the sockets,
        so it must end before, or peers can still connect."""
        for sock in self._sockets.values():
            sock.close()
        if self._reserved is not None:
            self._reserved.close()

    def _open_unix(self) -> None:
        """Listen on an abstract Unix socket with a random name, and advertise it. On a host without a boot id, log a
        warning and open none."""
        host = boot_id()
        if not host:
            log.warning("workers of this host pull pages over TCP: the system has no boot id")
            return
        name = SOCKET_PREFIX + secrets.token_hex(16)
        listener = self._sockets["--unix"] = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind("\0" + name)
        listener.listen(_BACKLOG)
        self.addresses += (RankAddress(0, SHM, f"{host}/{name}".encode()),)

    def _open_tcp(self, config: WorkerConfig) -> None:
        listener = self._sockets["--tcp"] = _bound(config, "peer_listen", _listening)
        self._advertise(config, TCP, listener)

    def _reserve_grpc(self, config: WorkerConfig) -> None:
        """Reserve the port for the agent processes' gRPC server, by a socket that never listens, note it in
        `grpc_listen`, and advertise it. Raises ConfigError if the port is in use, or if the host is not private and
        there is no TLS."""
        host = _place(config, "peer_grpc_listen")[0]
        require_private(config, host, "peer_grpc_listen", secured=bool(config.tls_cert))
        self._reserved = _bound(config, "peer_grpc_listen", _reserved)
        host, port = self._reserved.getsockname()[:2]
        self.grpc_listen = join_address(host, port)
        self._advertise(config, GRPC, self._reserved)

    def _advertise(self, config: WorkerConfig, transport: str, bound: socket.socket) -> None:
        """Add the address of a bound socket to those in the hello. Its host is that of --peer-advertise, else of
        --advertise, else the bound one, or this host's own if that is a wildcard. Logs a warning and adds nothing if no
        host is found, or only a wildcard; a loopback host is added."""
        host, port = bound.getsockname()[:2]
        if config.peer_advertise or config.advertise:
            host = config.peer_advertise or split_address(config.advertise, "--advertise")[0]
        elif host in _ANY_HOST:
            host = own_host(bound.family)
        if not host or host in _ANY_HOST:
            log.warning("no other host can pull pages: --peer-advertise does not say where, and there is no route")
            return
        self.addresses += (RankAddress(0, transport, f"{host}:{port}".encode()),)


def _bound(config: WorkerConfig, name: str, make: Make) -> socket.socket:
    """Make a socket on the address that option `name` gives; `auto`: a free port on the host of --listen. Raises
    ConfigError if that fails: PORT_IN_USE if the port is taken, BAD_VALUE otherwise, such as for an address of another
    host, a port that this user may not open, or no free descriptor."""
    host, port = _place(config, name)
    try:
        return make(host, port, socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        in_use, flag = error.errno == errno.EADDRINUSE, _flag(name)
        wanted = "another port" if in_use else "an address of this host and a port that this user may open"
        choice = f"Choose {wanted} with {flag} (auto picks a free port on the host of --listen, off opens none)."
        other = SHORTAGE_FIXES.get(error.errno or 0)
        raise ConfigError(
            "PORT_IN_USE" if in_use else "BAD_VALUE",
            f"The worker's peer port cannot listen on {join_address(host, port)}: {error.strerror}.",
            choice if other is None else f"{other}, or set {flag} to off: then there is no such port.",
            param=name,
        ) from error


def _place(config: WorkerConfig, name: str) -> tuple[str, int]:
    """The host and the port (0: any) that option `name` gives."""
    told = getattr(config, name)
    return split_address(told, _flag(name)) if told != AUTO else (split_address(config.listen, "--listen")[0], 0)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _listening(host: str, port: int, family: socket.AddressFamily) -> socket.socket:
    return socket.create_server((host, port), family=family, backlog=_BACKLOG)


def _reserved(host: str, port: int, family: socket.AddressFamily) -> socket.socket:
    """Bind a socket, which does not listen, to a port that other sockets of this user may share. Raises OSError if a
    given port is in use already."""
    if port:  # free ones are nobody's; this one might be shared with another worker
        with socket.socket(family, socket.SOCK_STREAM) as alone:
            alone.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            alone.bind((host, port))
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind((host, port))
    except BaseException:
        sock.close()
        raise
    return sock


def own_host(family: socket.AddressFamily) -> str:
    """Return the address of this host on its route to other hosts; empty if it has no such route. Asks the kernel by
    connecting a UDP socket; nothing is sent."""
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(_ELSEWHERE[family])  # nothing is sent
        except OSError:
            return ""
        return str(probe.getsockname()[0])
