"""CORS: decides which web pages of other origins may read answers, and returns the headers that say so. It is off by
default, unlike in vLLM: otherwise, every page that a user visits could use a router without keys on the user's machine.
This module knows nothing of routes."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from quire_common.errors import ConfigError
from quire_router.limits.rate_limits import LIMIT_HEADERS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from quire_router.config import RouterConfig

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s\"']+")
_MAX_AGE_S = b"600"
_EXPOSED = b", ".join((b"x-request-id", b"request-id", b"retry-after", b"retry-after-ms", *LIMIT_HEADERS))


class Cors:
    """The configured rules. `*` among the origins or headers means any. Among the methods it is passed on, and browsers
    take it as any method only without credentials. With credentials, the answer names the page's own origin."""

    def __init__(
        self, origins: Sequence[str], methods: Sequence[str], headers: Sequence[str], *, credentials: bool
    ) -> None:
        self._origins = frozenset(origins)
        self._methods = ", ".join(methods).encode()
        self._names_method = credentials and "*" in methods
        self._headers = tuple(headers)
        self._credentials = credentials

    def answer(self, origin: str) -> list[tuple[bytes, bytes]]:
        """Return the headers for any answer to a page of this origin; none if the page may not read it."""
        if not self._allows(origin):
            return []
        return [(b"access-control-expose-headers", _EXPOSED), *self._origin_headers(origin)]

    def preflight(self, origin: str, asked_method: str, asked_headers: str) -> list[tuple[bytes, bytes]]:
        """Return the headers for the answer to a preflight request: allowed methods, allowed headers and their
        lifetime, without those of `answer`, which the edge adds. If `*` is configured, the allowed headers are those
        that the browser asked for. With credentials, the same holds for the method, since browsers then do not take `*`
        as any method. Empty if the origin is not allowed."""
        if not self._allows(origin):
            return []
        methods = asked_method.encode("latin-1") if self._names_method else self._methods
        headers = asked_headers if "*" in self._headers else ", ".join(self._headers)
        found = [
            (b"access-control-allow-methods", methods),
            (b"access-control-allow-headers", headers.encode("latin-1")),
            (b"access-control-max-age", _MAX_AGE_S),
        ]
        if self._names_method:
            found.append((b"vary", b"access-control-request-method, access-control-request-headers"))
        return found

    def _allows(self, origin: str) -> bool:
        return bool(origin) and ("*" in self._origins or origin in self._origins)

    def _origin_headers(self, origin: str) -> list[tuple[bytes, bytes]]:
        """Return the headers that allow this origin, and credentials if they are configured. The origin is `*` if any
        origin may read answers without credentials; otherwise it is named, and caches must distinguish origins."""
        any_origin = "*" in self._origins and not self._credentials
        found = [(b"access-control-allow-origin", b"*" if any_origin else origin.encode("latin-1"))]
        if not any_origin:
            found.append((b"vary", b"origin"))
        if self._credentials:
            found.append((b"access-control-allow-credentials", b"true"))
        return found


NO_CORS = Cors((), (), (), credentials=False)


def make_cors(config: RouterConfig) -> Cors:
    """Make the configured rules. Raises ConfigError for an allowed origin that is none of `scheme://host[:port]`, `*`
    and `null`, since it would silently allow no page. Methods and headers are not checked."""
    for origin in config.allowed_origins:
        if origin not in ("*", "null") and not _ORIGIN.fullmatch(origin):
            raise ConfigError(
                "BAD_ORIGIN",
                f"allowed_origins has {origin!r}, which is not an origin.",
                "Give scheme://host or scheme://host:port, comma separated, or *.",
                param="allowed_origins",
            )
    return Cors(
        config.allowed_origins,
        config.allowed_methods,
        config.allowed_headers,
        credentials=config.allow_credentials,
    )
