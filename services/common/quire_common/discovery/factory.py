"""Makes the implementation that the `discovery` option names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire_common.discovery.dns_discovery import DnsDiscovery
from quire_common.discovery.static_discovery import StaticDiscovery
from quire_common.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from quire_common.discovery.endpoint import Discovery

    Static = Mapping[str, Sequence[str]]


def make_discovery(spec: str, static: Static, spec_file: str = "") -> Discovery:
    """Make the discovery that `spec` names: `static` or `dns`, for which `static` has the addresses by service, or a
    Redis URL. The text before the first colon decides. No peer is asked yet. If `spec_file` is given, the URL came from
    that file, whose changes of user and password are followed if the URL has a password. Raises ConfigError for an
    unknown kind, text after the colon of `static` or `dns`, a bad address or URL, or a file that cannot be read."""
    make = _KINDS.get(spec.partition(":")[0])
    if make is None:
        raise ConfigError(
            "BAD_DISCOVERY",
            f"Unknown discovery {spec.partition(':')[0]!r}.",
            "Supported: static, dns, redis://host:port/db, rediss://host:port/db.",
            param="discovery",
        )
    if make is not _redis and ":" in spec:
        raise ConfigError(
            "BAD_DISCOVERY",
            f"The discovery {spec.partition(':')[0]} takes no address.",
            "Give the addresses of the services by their own options.",
            param="discovery",
        )
    return make(spec, static, spec_file)


def _static(spec: str, static: Static, spec_file: str) -> Discovery:
    return StaticDiscovery(static)


def _dns(spec: str, static: Static, spec_file: str) -> Discovery:
    return DnsDiscovery(static)


def _redis(spec: str, static: Static, spec_file: str) -> Discovery:
    """Make the discovery by the Redis of this URL. Raises ConfigError for a bad host, port or option."""
    # Imported on demand: it takes 0.2 s, and most processes do without.
    from quire_common.discovery.redis_discovery import RedisDiscovery, RedisSettings

    return RedisDiscovery(RedisSettings.parse(spec, spec_file))


_KINDS: dict[str, Callable[[str, Static, str], Discovery]] = {
    "static": _static,
    "dns": _dns,
    "redis": _redis,
    "rediss": _redis,
}
