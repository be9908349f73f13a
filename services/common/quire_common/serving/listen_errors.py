"""The error of a port that a service cannot open. It names the cause that the operating system gives."""

from __future__ import annotations

import errno
import socket

from quire_common.config import split_address
from quire_common.errors import ConfigError

# Fixes for missing resources, by error number. These errors do not depend on the address.
SHORTAGE_FIXES = {
    errno.EMFILE: "Let the service open more files (ulimit -n)",
    errno.ENFILE: "Let the system open more files (fs.file-max)",
    errno.ENOBUFS: "Free memory of this host",
    errno.ENOMEM: "Free memory of this host",
}


def listen_error(
    error: OSError, what: str, address: str, flag: str, hint: str = "", *, host_flag: str = ""
) -> ConfigError:
    """Return the ConfigError for `what`, such as "The router", which cannot listen on `address` because of `error`:
    PORT_IN_USE if the port is taken, BAD_VALUE otherwise, such as for an address of another host, a port that this user
    may not open, or no free descriptor. `flag` is the option that has the address or the port. `hint` says which of its
    values are special. `host_flag` is the option that has the host, if `flag` has only the port."""
    message = f"{what} cannot listen on {address}: {error.strerror or error}."
    flag_and_hint = f"{flag} ({hint})" if hint else flag
    param = flag.removeprefix("--").replace("-", "_")
    if error.errno == errno.EADDRINUSE:
        fix = f"Stop the process that holds the port, or choose another with {flag_and_hint}."
        return ConfigError("PORT_IN_USE", message, fix, param=param)
    host = f"an address of this host with {host_flag}," if host_flag else "an address of this host"
    fix = f"Choose {host} and a port that this user may open with {flag_and_hint}"
    return ConfigError("BAD_VALUE", message, f"{SHORTAGE_FIXES.get(error.errno or 0, fix)}.", param=param)


def find_listen_error(address: str, *, shared: bool = False) -> OSError:
    """Return the error that keeps a server from listening on `host:port`. gRPC does not report it. Tries to listen on
    each address of the host; an error that the port is taken goes before others. If all can be opened now, the port was
    taken until a moment ago, and the error says so. `shared`: sockets that share the port (SO_REUSEPORT) do not take
    it. Raises ConfigError for a malformed address."""
    host, port = split_address(address, "address")
    errors: list[OSError] = []
    try:
        places = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        return error
    except ValueError as error:  # a name that cannot be encoded
        return OSError(errno.EINVAL, f"{host!r} is no name of a host ({error})")
    for family, kind, protocol, _, place in places:
        try:
            with socket.socket(family, kind, protocol) as candidate:
                candidate.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if shared:
                    candidate.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
                candidate.bind(place)
                candidate.listen()
        except OSError as error:
            errors.append(error)
    in_use = [error for error in errors if error.errno == errno.EADDRINUSE]
    return next(iter(in_use + errors), OSError(errno.EADDRINUSE, "another process had the port"))
