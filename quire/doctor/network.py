"""Checks of the ports on which Quire would listen, and of a Redis that it would use."""

from __future__ import annotations

import errno
import re
import socket
import ssl
import time
from urllib.parse import SplitResult, unquote, urlsplit

from quire.doctor.finding import Finding, failed, ok, warning

_TIMEOUT_S = 3.0
_SLOW_S = 0.05
_LEAST_VERSION = 6
_REDIS_PORT = 6379
_MAX_PORT = 65535
_REDIS_URL = "redis://:password@host:port/0"


def check_port(host: str, port: int) -> Finding:
    """Report whether a server could bind the port at this address, which is a name or an IP address. A port of another
    process is a warning, since `quire up` without --port then takes a free one. An address that is not this machine's,
    a port that this user may not take, and a number that is no port are failures."""
    if not 0 <= port <= _MAX_PORT:
        return failed("port", f"{port} is no port", f"Give --port a number from 0 to {_MAX_PORT}.")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return warning(
                    "port",
                    f"{host}:{port} is taken",
                    "Without --port, `quire up` then takes a free one; or give another --port.",
                )
            fix = "Give an address of this machine with --host, and a port that this user may take with --port."
            return failed("port", f"no server can listen on {host}:{port} ({error.strerror})", fix)
    return ok("port", f"{host}:{port} is free")


def check_redis(address: str) -> Finding:
    """Check a Redis at `address`: host:port, or a URL, whose password is not shown. Failed: no valid host or port,
    another scheme than redis or rediss, no connection within 3 s, 3 s without a byte of the answer, an error as answer
    (a wrong password, for one), or a version that is below 6 or missing. Warnings: it wants a password, or takes more
    than 50 ms from the connection to the answer. Otherwise ok, with version and time."""
    try:
        url = urlsplit(address if "://" in address else f"redis://{address}")
        host, port = url.hostname or "127.0.0.1", url.port or _REDIS_PORT
        if "@" in url.path + url.fragment:
            raise ValueError("the host would be a part of a password that is not encoded")
        # As the resolver will encode the name. UnicodeError, a ValueError: a part of the name is empty or too long.
        host.encode("idna")
    except ValueError:
        return failed("redis", "its address has no valid host and port", f"Give host:port, or {_REDIS_URL}.")
    if url.scheme not in ("redis", "rediss"):
        return failed("redis", f"{url.scheme} is none of its schemes", f"Give host:port, or {_REDIS_URL}.")
    shown, began = f"{host}:{port}", time.perf_counter()
    try:
        answer = _ask_redis(url, host, port)
    except OSError as error:
        return failed("redis", f"{shown} does not answer: {error}", "Start it, or correct --redis host:port.")
    took_s = time.perf_counter() - began
    if answer.startswith(b"-NOAUTH"):
        return warning("redis", f"{shown} wants a password", f"Put it in the URL: {_REDIS_URL}.")
    if answer.startswith(b"-"):
        refusal = answer[1:].split(b"\r", 1)[0].decode("ascii", "replace")
        return failed("redis", f"{shown} refuses: {refusal}", f"Correct user and password in the URL: {_REDIS_URL}.")
    version = answer.partition(b"redis_version:")[2].split(b"\r", 1)[0].decode("ascii", "replace")
    major = re.match(r"\d{1,9}", version)
    if major is None or int(major[0]) < _LEAST_VERSION:
        return failed("redis", f"{shown} is version {version or 'unknown'}", f"Use {_LEAST_VERSION} or later.")
    if took_s > _SLOW_S:
        return warning("redis", f"{version}, {took_s * 1000:.0f} ms away", "Rate limits wait for it: put it nearer.")
    return ok("redis", f"{version}, {took_s * 1000:.1f} ms away")


def _ask_redis(url: SplitResult, host: str, port: int) -> bytes:
    """Connect, with TLS for rediss, log in if the URL has a password, and send PING and INFO. Returns the answer's
    bytes up to the end of the version's line, those up to the end of INFO's reply if it has no version, those from an
    error on if that comes first, or all that came before the connection ended. Raises OSError, also after 3 s without
    an answer."""
    connection = socket.create_connection((host, port), _TIMEOUT_S)
    if url.scheme == "rediss":
        connection = ssl.create_default_context().wrap_socket(connection, server_hostname=host)
    with connection:
        asked = b"PING\r\nINFO server\r\n"
        if url.password is not None:
            words = [b"AUTH", *(unquote(word).encode() for word in (url.username, url.password) if word)]
            asked = b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words) + asked
        connection.sendall(asked)
        connection.settimeout(_TIMEOUT_S)
        answer = b""
        while not _is_complete(answer) and len(answer) < 65536:
            piece = connection.recv(4096)
            if not piece:
                break
            answer += piece
            # Before the version, only an error begins a line with a dash.
            if error := re.search(rb"^-", answer.partition(b"redis_version:")[0], re.MULTILINE):
                return answer[error.start() :]
    return answer


def _is_complete(answer: bytes) -> bool:
    """Whether the answer has the whole line of the version, or the whole reply to INFO."""
    if b"\r" in answer.partition(b"redis_version:")[2]:
        return True
    info = re.search(rb"^\$(\d{1,9})\r\n", answer, re.MULTILINE)
    return info is not None and len(answer) >= info.end() + int(info[1])
