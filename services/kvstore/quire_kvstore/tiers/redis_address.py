"""Where a Redis is, from its URL, and the socket to it. This module knows nothing of what is said there.

redis://[[user]:password@]host[:6379][/db]     plain
rediss://...[?ssl_ca_certs=FILE]               TLS, by the system's authorities or those of a file
unix://[[user]:password@]/path[?db=N]          a socket of this machine
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import SplitResult, parse_qs, unquote, urlsplit

from quire_common.config import read_secret
from quire_common.errors import ConfigError
from quire_common.identity.watched_files import WatchedFiles

if TYPE_CHECKING:
    from collections.abc import Callable

_PORT = 6379


@dataclass(frozen=True)
class RedisAddress:
    """`path` is the path of a Unix socket, or empty. With `tls` and an empty `ca_file`, the system's authorities
    apply."""

    host: str = ""
    port: int = _PORT
    path: str = ""
    db: int = 0
    user: str = ""
    password: str = ""
    tls: bool = False
    ca_file: str = ""

    def __str__(self) -> str:
        """Without credentials, for logs."""
        return self.path or f"{self.host}:{self.port}"

    @classmethod
    def parse(cls, url: str) -> RedisAddress:
        """Parse a redis, rediss or unix URL. Raises ConfigError for another URL, a bad database or an unknown option.
        The error shows no part of the user or the password."""
        try:
            return _parse(url)
        except ValueError as error:
            raise ConfigError(
                "BAD_REDIS_URL", f"redis_url is not the URL of a Redis: {error}.", "Write redis://host:6379/0."
            ) from error

    def connect(self, timeout_s: float) -> socket.socket:
        """Return a connected socket, with TLS if `tls` is set, and with this time limit for each of its operations.
        Without TLS the kernel keeps the limit, so that an operation on a large value is one call to it. Raises OSError
        if the connection or the TLS handshake fails."""
        connection = self._connect(timeout_s)
        try:
            if self.tls:
                context = ssl.create_default_context(cafile=self.ca_file or None)
                return context.wrap_socket(connection, server_hostname=self.host)
            limit = struct.pack("ll", int(timeout_s), int(timeout_s % 1 * 1e6))
            connection.settimeout(None)
            for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                connection.setsockopt(socket.SOL_SOCKET, option, limit)
        except BaseException:
            connection.close()
            raise
        return connection

    def _connect(self, timeout_s: float) -> socket.socket:
        """Open a TCP connection, or one to the Unix socket at `path`. Raises OSError if nobody accepts it; each
        address of the host gets `timeout_s`."""
        if not self.path:
            connection = socket.create_connection((self.host, self.port), timeout_s)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return connection
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(timeout_s)
            connection.connect(self.path)
        except BaseException:
            connection.close()
            raise
        return connection


def redis_address(url: str, url_file: str = "") -> Callable[[], RedisAddress]:
    """Return a function that returns the Redis's current address: that of `url` or, with `url_file`, of the URL in that
    file, which is read again after it changes. Raises ConfigError for a bad URL, or a file that cannot be read, at this
    call; at a later change the former address stays."""
    if not url_file:
        address = RedisAddress.parse(url)
        return lambda: address
    watched = WatchedFiles("Redis URL", [url_file], lambda: RedisAddress.parse(read_secret(url_file)))
    return lambda: watched.value


def _parse(url: str) -> RedisAddress:
    """Parse a redis, rediss or unix URL into an address. The database comes from the option `db` or else, unless the
    URL is a unix one, from the path; the default is 0. Raises ValueError that says what is wrong, also for an unknown
    option, and for a user or password that is not encoded."""
    parts, port, options = _split(url)
    user, password = unquote(parts.username or ""), unquote(parts.password or "")
    if parts.scheme == "unix":
        if not parts.path:
            raise ValueError("it names no socket")
        database = options.pop("db", "0")
        address = RedisAddress(path=unquote(parts.path), db=_db(database, url), user=user, password=password)
    elif parts.scheme in ("redis", "rediss"):
        if not parts.hostname:
            raise ValueError("it names no host")
        if "@" in parts.path + parts.fragment:
            raise ValueError("it has a user or password whose special characters are not percent-encoded")
        tls = parts.scheme == "rediss"
        address = RedisAddress(
            parts.hostname,
            port or _PORT,
            db=_db(options.pop("db", parts.path.strip("/") or "0"), url),
            user=user,
            password=password,
            tls=tls,
            ca_file=options.pop("ssl_ca_certs", "") if tls else "",
        )
    else:
        raise ValueError(f"the scheme{_quoted(parts.scheme, url)} is not redis, rediss or unix")
    if options:
        raise ValueError(f"the option{_quoted(next(iter(options)), url)} is unknown")
    return address


def _split(url: str) -> tuple[SplitResult, int | None, dict[str, str]]:
    """Return the parts of a URL, its port and its options. Raises ValueError if they are malformed, without the
    library's text, which quotes parts of a password."""
    with contextlib.suppress(ValueError):
        parts = urlsplit(url)
        options = parse_qs(parts.query, strict_parsing=bool(parts.query))
        port = None if parts.scheme == "unix" else parts.port
        return parts, port, {name: values[-1] for name, values in options.items()}
    raise ValueError("its host, port or options are malformed, or its password is not percent-encoded")


def _db(text: str, url: str) -> int:
    """Parse the number of a database. Raises ValueError unless the text consists of digits."""
    if not text.isascii() or not text.isdigit():
        raise ValueError(f"the database{_quoted(text, url)} is not a number")
    return int(text)


def _quoted(text: str, url: str) -> str:
    """Return a blank and the quoted text, or nothing if the text may be a part of the URL's user or password."""
    shown = text in url.rpartition("@")[2] or url.startswith(f"{text}://")
    return f" {text!r}" if text and shown else ""
