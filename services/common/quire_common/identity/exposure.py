"""Refuses plain text that other hosts reach, unless `--insecure` says that the network is private."""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING

from quire_common.errors import ConfigError

if TYPE_CHECKING:
    from quire_common.config import ServiceConfig

_TLS_FIX = "Give --tls-cert and --tls-key"


def require_private(config: ServiceConfig, host: str, option: str, *, secured: bool, fix: str = _TLS_FIX) -> None:
    """Raise ConfigError if a port without TLS would be open to other hosts. The port is fine if it is `secured`, `host`
    is a loopback address, or the config has `insecure`. `option` names the option that opens the port, and `fix` says
    how to give it TLS."""
    if secured or config.insecure or is_loopback(host):
        return
    raise ConfigError(
        "INSECURE_LISTEN",
        f"--{option.replace('_', '-')} opens a port on {host}, which other hosts reach, without TLS.",
        f"{fix}, listen on 127.0.0.1, or give --insecure if only trusted hosts reach this network.",
        param=option,
    )


def require_near(config: ServiceConfig, host: str, option: str) -> None:
    """Raise ConfigError if a service would send plain text to another host, unless the config has `insecure`. `option`
    names the option with the destination."""
    if config.insecure or is_loopback(host):
        return
    raise ConfigError(
        "INSECURE_CONNECT",
        f"--{option.replace('_', '-')} sends to {host}, another host, without TLS.",
        "Send to a proxy on 127.0.0.1 that has TLS, or give --insecure if only trusted hosts reach this network.",
        param=option,
    )


def is_loopback(host: str) -> bool:
    """Return whether the host is a loopback address, IPv4 mapped into IPv6 included, or exactly `localhost`. False for
    any other name, which is not looked up."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback
