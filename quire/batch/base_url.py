"""Parses the base URL of an HTTP server, for the commands that take `--base-url`. This module opens no connection."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from quire.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class BaseUrl:
    """The parts of a base URL. `secure`: by TLS. `path` comes before the path of each endpoint; it has no slash at its
    end, and may be empty."""

    host: str
    port: int
    secure: bool
    path: str


def parse_base_url(url: str) -> BaseUrl:
    """Return the parts of a URL; without a port, it is 80, or 443 for https. Raises InvalidArgument for a URL that is
    not http or https, has no host, or whose port is not a number up to 65535."""
    try:
        parts = urlsplit(url)
        host, port, secure = parts.hostname, parts.port, parts.scheme == "https"
    except ValueError as error:
        raise _bad_url(url) from error
    if parts.scheme not in ("http", "https") or not host:
        raise _bad_url(url)
    return BaseUrl(host, port or (443 if secure else 80), secure, parts.path.rstrip("/"))


def _bad_url(url: str) -> InvalidArgument:
    """Return the error for a text that is no base URL."""
    return InvalidArgument(
        "BAD_URL",
        f"{url!r} is not a base URL.",
        "Give an http or https URL, such as http://127.0.0.1:8000.",
        param="base_url",
    )
