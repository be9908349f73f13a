"""What a local stack is made of: which model, where it is reached, which flags each of the five services gets.

Knows the services by name and flags alone, never by import.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

# Dependencies first: the order in which a failure is blamed, and the reverse of the order in which they are stopped.
SERVICES = ("worker", "kvstore", "tokenizer", "scheduler", "router")
# A wave is stopped when nothing of the waves before it is left to call it.
STOP_WAVES = (("router",), ("scheduler", "tokenizer"), ("worker", "kvstore"))
LOOPBACK = "127.0.0.1"
_ANY_HOST = ("0.0.0.0", "::")


@dataclass(frozen=True)
class StackSpec:
    """`flags` are further options by service, spelled as the service spells them, without the dashes."""

    name: str
    model: str
    host: str = LOOPBACK
    # Of HTTP; 0 picks a free one.
    port: int = 0
    # Of the router's gRPC, on the same host; 0 picks a free one.
    grpc_port: int = 0
    api_keys: tuple[str, ...] = ()
    # Ends when the process that started it does.
    owned: bool = True
    # An owned stack's directory may go when it has ended well.
    keep_directory: bool = True
    flags: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    # Prefix of each service's command line; by default `python -m quire_<service>`.
    commands: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    start_timeout_s: float = 900.0
    drain_timeout_s: float = 30.0

    def to_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, line: str) -> StackSpec:
        """The inverse of `to_json`."""
        values: dict[str, Any] = json.loads(line)
        values["api_keys"] = tuple(values["api_keys"])
        values["commands"] = {name: tuple(command) for name, command in values["commands"].items()}
        return cls(**values)

    def command(self, service: str, ports: Mapping[str, int]) -> list[str]:
        """The service's whole command line. `ports` are gRPC ports by service, and `http`."""
        prefix = self.commands.get(service) or (sys.executable, "-m", f"quire_{service}")
        options = {**self._wiring(service, ports), **self.flags.get(service, {})}
        return [*prefix, *(f"--{name}={value}" for name, value in options.items())]

    def environment(self, service: str) -> dict[str, str]:
        """What the service sees. Keys travel here, since anyone may read command lines."""
        # The folder in which the user stands must not be able to shadow a module.
        extra = {"PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1"}
        if service == "router" and self.api_keys:
            extra["QUIRE_ROUTER_API_KEY"] = ",".join(self.api_keys)
        return {**os.environ, **extra}

    @property
    def local_host(self) -> str:
        """Where this machine reaches what listens on `host`."""
        return LOOPBACK if self.host in _ANY_HOST else self.host

    def _wiring(self, service: str, ports: Mapping[str, int]) -> dict[str, str]:
        at = {name: f"{LOOPBACK}:{port}" for name, port in ports.items()}
        if service == "router":
            at["router"] = join(self.host, ports["router"])
        common = {
            "listen": at[service],
            "log-format": "json",
            "drain-timeout-s": str(self.drain_timeout_s),
        }
        own = {
            "worker": {"model": self.model, "kvstore": at["kvstore"], "torch-threads": str(_worker_threads())},
            "kvstore": {},
            "tokenizer": {"model": self.model},
            "scheduler": {"worker": at["worker"], "kvstore": at["kvstore"]},
            "router": {
                "schedulers": at["scheduler"],
                "tokenizers": at["tokenizer"],
                "host": self.host,
                "port": str(ports["http"]),
            },
        }
        return {**common, **own[service]}


def _worker_threads() -> int:
    """Half of the cores: the other services need some too, and torch's threads spin while they wait for a core."""
    return max(1, len(os.sched_getaffinity(0)) // 2)


def join(host: str, port: int) -> str:
    """`host:port`, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
