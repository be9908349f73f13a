"""StackSpec: the description of a local stack: the model, the number of processes of each service, the addresses, and
the flags of each service.

This module knows the services only by name and flags, and imports none. A *member* is one process: `worker`, or
`worker-1`, `worker-2`, ... if there are several, or `worker-prefill-1`, `worker-decode-1`, ... if replicas have roles.
A scheduler and a worker with the same suffix are a replica.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.errors import InvalidArgument
from quire.local.gpus import gpu_environment
from quire.local.page_cache import kvstore_environment
from quire.local.service_tls import service_flags

if TYPE_CHECKING:
    from quire.local.private_network import PrivateNetwork

_KV_EVENTS_ENDPOINT = "tcp://127.0.0.1:5557"
_ROOT = Path("/")
_TCP = re.compile(r"(tcp://.+):(\d+)")


# Dependencies first: the order in which a failure is blamed, and the reverse of the order in which they are stopped.
SERVICES = ("worker", "kvstore", "tokenizer", "scheduler", "router")
# A wave is stopped when nothing of the waves before it is left to call it.
STOP_WAVES = (("router",), ("scheduler", "tokenizer"), ("worker", "kvstore"))
LOOPBACK = "127.0.0.1"
# Of replicas that do not do both.
ROLES = ("prefill", "decode")
# Of one service on one machine: a slip of the finger must not start thousands of processes.
_MOST_MEMBERS = 64
_ANY_HOST = ("0.0.0.0", "::")
_KV_EVENTS = "kv-events-config"
# Options that carry credentials, by service: anyone may read command lines. A test compares them with the services'
# own declarations.
_SECRETS = {"worker": ("page-mac-key",), "kvstore": ("page-mac-key", "redis-url"), "router": ("api-key", "redis")}


@dataclass(frozen=True)
class StackSpec:
    """The description of a stack. `flags` are further options by service or member, spelled as the service spells them,
    without the dashes. Raises InvalidArgument for a number of members or a port out of range, and for prefill
    replicas without others that decode, or the reverse.

    A flag without a value is True, or False for its `--no-` form.
    """

    name: str
    model: str
    host: str = LOOPBACK
    # The port for HTTP; 0 picks a free port.
    port: int = 0
    # The port for the router's gRPC, on the same host; 0 picks a free port.
    grpc_port: int = 0
    # Replicas are pairs of a scheduler and a worker. `replicas` is the number of those that both prefill and decode.
    # `prefill` and `decode` are the numbers of those that only prefill, and only decode.
    replicas: int = 1
    prefill: int = 0
    decode: int = 0
    tokenizers: int = 1
    # Addresses of members in network namespaces of their own; the others are on this machine's.
    hosts: Mapping[str, str] = field(default_factory=dict)
    api_keys: tuple[str, ...] = ()
    # The folder that `quire certs` wrote. With it, services use mutual TLS and the public ports TLS; empty: no TLS.
    tls_folder: str = ""
    # Whether the stack ends when the process that started it ends.
    owned: bool = True
    # An owned stack's directory may go when it has ended well.
    keep_directory: bool = True
    flags: Mapping[str, Mapping[str, str | bool]] = field(default_factory=dict)
    # Prefix of the command line of a service or member; by default `python -m quire_<service>`.
    commands: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    start_timeout_s: float = 900.0
    drain_timeout_s: float = 30.0
    # The delay before a member that died is started again. It doubles while the member dies again and again.
    restart_delay_s: float = 0.1

    def __post_init__(self) -> None:
        fewest = {"replicas": 0 if self.with_roles else 1, "prefill": 0, "decode": 0, "tokenizers": 1}
        bounds = {name: (least, _MOST_MEMBERS) for name, least in fewest.items()}
        for name, (low, high) in (bounds | dict.fromkeys(("port", "grpc_port"), (0, 65535))).items():
            if not low <= getattr(self, name) <= high:
                raise InvalidArgument(
                    "BAD_VALUE", f"{name} is {getattr(self, name)}.", f"Give {low} to {high}.", param=name
                )
        for name, other in (ROLES, reversed(ROLES)):
            if getattr(self, name) and not (getattr(self, other) or self.replicas):
                raise InvalidArgument(
                    "ROLE_ALONE",
                    f"There are {name} replicas, and none to {other}.",
                    f"Give --{other} (or --replicas, which do both).",
                    param=other,
                )

    def to_json(self) -> str:
        """Encode the spec as one line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, line: str) -> StackSpec:
        """Decode what `to_json` encoded."""
        values: dict[str, Any] = json.loads(line)
        values["api_keys"] = tuple(values["api_keys"])
        values["commands"] = {name: tuple(command) for name, command in values["commands"].items()}
        return cls(**values)

    @property
    def members(self) -> tuple[str, ...]:
        """Return every process by name, dependencies first."""
        return tuple(name for service in SERVICES for name in self.members_of(service))

    def members_of(self, service: str) -> tuple[str, ...]:
        """Return the names of a service's processes: `tokenizer` for one, `tokenizer-1`, `tokenizer-2` for several. If
        replicas have roles, workers and schedulers without a role come first, as `worker-1`, then `worker-prefill-1`,
        then `worker-decode-1`."""
        if service not in ("worker", "scheduler"):
            return _numbered(service, self.tokenizers if service == "tokenizer" else 1)
        if not self.with_roles:
            return _numbered(service, self.replicas)
        counts = {service: self.replicas, **{f"{service}-{role}": getattr(self, role) for role in ROLES}}
        return tuple(f"{prefix}-{number}" for prefix, count in counts.items() for number in range(1, count + 1))

    @property
    def with_roles(self) -> bool:
        """Whether some replicas prefill prompts for others."""
        return bool(self.prefill or self.decode)

    def in_network(self, network: PrivateNetwork) -> StackSpec:
        """Return the same stack with each member at its own address of the network; its command line enters the
        member's namespace first."""
        inside = {name: (*network.prefix(name), *self._program(name)) for name in self.members}
        return replace(self, hosts=network.hosts, commands=inside)

    def host_of(self, member: str) -> str:
        """Return the address on which the member listens; `http` is the router's HTTP port. The address is the member's
        in the network, if there is one, else `host` for the router and 127.0.0.1 for others."""
        if member in ("router", "http"):
            return self.hosts.get("router", self.host)
        return self.hosts.get(member, LOOPBACK)

    def reached_at(self, member: str) -> str:
        """Return the address at which this machine reaches the member: 127.0.0.1 for one that listens on all addresses,
        else the address on which it listens."""
        host = self.host_of(member)
        return LOOPBACK if host in _ANY_HOST else host

    def serves_without(self, lost: Collection[str]) -> bool:
        """Whether requests can be answered without these members. That takes the router, a tokenizer and a complete
        replica, of whatever role; the kvstore is not needed."""
        pairs = [set(replica_of(name)) for name in self.members_of("scheduler")]
        return (
            "router" not in lost
            and not set(self.members_of("tokenizer")) <= set(lost)
            and any(pair.isdisjoint(lost) for pair in pairs)
        )

    def command(self, member: str, ports: Mapping[str, int]) -> list[str]:
        """Return the member's whole command line: its program, the flags that connect the stack, and the user's flags,
        which win. `ports` are gRPC ports by member, and `http`. Options with credentials are left out, since
        `environment` has them."""
        options, secrets = {**self._wiring(member, ports), **self._flags_of(member)}, self._secrets_of(member)
        return [*self._program(member), *(_flag(name, value) for name, value in options.items() if name not in secrets)]

    def environment(self, member: str) -> dict[str, str]:
        """Return the member's environment: this process's, Python's settings, a worker's GPU, the kvstore's default
        disk folder, and the credentials of the member's own service: the API keys of the router (those of the flag
        `api-key` win), and the flags that its service declares secret. This process's variables win over the default
        disk folder, and the others win over them. Credentials are here, since every user of the machine may read
        command lines."""
        # The folder in which the user stands must not be able to shadow a module.
        extra = {"PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1"}
        if member == "router" and self.api_keys:
            extra["QUIRE_ROUTER_API_KEY"] = ",".join(self.api_keys)
        prefix = f"QUIRE_{service_of(member)}_"
        secrets = self._secrets_of(member).items()
        extra |= {f"{prefix}{name}".replace("-", "_").upper(): value for name, value in secrets}
        if service_of(member) == "worker":
            extra |= gpu_environment(self.members_of("worker"), member)
        unless_said = kvstore_environment(self.name, lasting=self.keep_directory) if member == "kvstore" else {}
        return {**unless_said, **os.environ, **extra}

    def _program(self, member: str) -> tuple[str, ...]:
        service = service_of(member)
        return self.commands.get(member) or self.commands.get(service) or (sys.executable, "-m", f"quire_{service}")

    def _flags_of(self, member: str) -> dict[str, str | bool]:
        """Return the user's flags for the member: the flags of its service, and its own, which take precedence. Each
        scheduler gets its own ports for KV events, unless its own flags name them."""
        service, own = service_of(member), self.flags.get(member, {})
        flags = {**self.flags.get(service, {}), **own}
        events = flags.get(_KV_EVENTS)
        if service == "scheduler" and isinstance(events, str) and _KV_EVENTS not in own:
            flags[_KV_EVENTS] = kv_events_of(events, self.members_of(service).index(member))
        return flags

    def _secrets_of(self, member: str) -> dict[str, str]:
        """Return the user's flags for the member that carry credentials. A flag without its value is none: it stays on
        the command line, and the service refuses it."""
        flags = {name: value for name, value in self._flags_of(member).items() if isinstance(value, str)}
        return {name: flags[name] for name in _SECRETS.get(service_of(member), ()) if name in flags}

    def _wiring(self, member: str, ports: Mapping[str, int]) -> dict[str, str | bool]:
        """Return the flags that a member gets from the stack: its address, log format, drain time, instance name, TLS
        files, and by service its model, its role and the addresses of its peers. A worker's threads are its share of
        half of the cores. A member of a private network may be reached without TLS."""
        at = {name: join(self.host_of(name), port) for name, port in ports.items()}
        common: dict[str, str | bool] = {
            "listen": at[member],
            "log-format": "json",
            "drain-timeout-s": str(self.drain_timeout_s),
        }
        if member != service_of(member):
            common["instance"] = member
        if member in self.hosts:  # a private network's, which other hosts do not reach
            common["insecure"] = True
        if self.tls_folder:
            common |= service_flags(self.tls_folder, service_of(member))
        own: dict[str, str | bool]
        match service_of(member):
            case "worker":
                threads = str(_worker_threads(len(self.members_of("worker"))))
                own = {"model": self.model, "kvstore": at["kvstore"], "torch-threads": threads}
                if member in self.hosts and self.with_roles:
                    own["peer-hosts"] = ",".join(dict.fromkeys(map(self.host_of, self.members_of("worker"))))
            case "tokenizer":
                own = {"model": self.model}
            case "scheduler":
                own = {"worker": at[replica_of(member)[1]], "kvstore": at["kvstore"]}
                if role := role_of(member):
                    own["role"] = role
            case "router":
                own = {
                    "schedulers": self._peers("scheduler", at),
                    "tokenizers": self._peers("tokenizer", at),
                    "kvstores": at["kvstore"],
                    "host": self.host_of("http"),
                    "port": str(ports["http"]),
                }
            case _:
                own = {}
        return {**common, **own}

    def _peers(self, service: str, at: Mapping[str, str]) -> str:
        """Return the addresses of a service's members, as the flag of static discovery has them. If there are several
        members, each address has its name."""
        names = self.members_of(service)
        return at[service] if len(names) == 1 else ",".join(f"{name}={at[name]}" for name in names)


def _numbered(name: str, count: int) -> tuple[str, ...]:
    return (name,) if count == 1 else tuple(f"{name}-{number}" for number in range(1, count + 1))


def _flag(name: str, value: str | bool) -> str:
    """Return a command-line flag: `--name` or `--no-name` for a bool, `--name=value` for a text."""
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no-{name}"
    return f"--{name}={value}"


def service_of(member: str) -> str:
    """Return the service of a member: `worker` for `worker-2`."""
    return member.partition("-")[0]


def role_of(member: str) -> str:
    """Return the role of a member: `prefill` for `worker-prefill-2`; empty if it has none."""
    return next((role for role in ROLES if f"-{role}-" in member), "")


def replica_of(member: str) -> tuple[str, str]:
    """Return scheduler and worker of the replica to which a scheduler or worker belongs."""
    _, dash, number = member.partition("-")
    return f"scheduler{dash}{number}", f"worker{dash}{number}"


def usable_cores() -> int:
    """Return the number of cores that this process may use, at least 1: those of its affinity (all of the machine on
    systems that do not say, such as macOS), and at most as many whole cores as the CPU quotas of its cgroups allow."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([cores, *_cpu_quotas()]))


def _cpu_quotas() -> Iterator[int]:
    """Yield the CPU quotas, in whole cores, of this process's cgroups (version 1 or 2) and of their parents. The
    cgroups are expected under /sys/fs/cgroup. Groups without a quota are left out."""
    for line in _text(_ROOT / "proc/self/cgroup").splitlines():
        controllers, _, path = line.partition(":")[2].partition(":")
        if controllers and "cpu" not in controllers.split(","):
            continue
        top = _ROOT / "sys/fs/cgroup" / ("cpu" if controllers else "")
        folder = top / path.lstrip("/")
        if not folder.is_dir():  # a container that sees the host's path finds its own group at the top
            folder = top
        for each in (folder, *folder.parents):
            text = _text(each / "cpu.max") or _text(each / "cpu.cfs_quota_us") + _text(each / "cpu.cfs_period_us")
            quota, _, period = " ".join(text.split()).partition(" ")
            if quota.isdigit() and period.isdigit() and int(period):  # without a quota, it is "max" or -1
                yield int(quota) // int(period)
            if each == top:
                break


def _text(path: Path) -> str:
    """Return the file's text; empty if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""


def _worker_threads(replicas: int) -> int:
    """Return the number of threads for each of `replicas` workers, at least 1: all together have half of the cores.
    Other services need cores too, and torch's threads spin while they wait for a core."""
    return max(1, usable_cores() // 2 // replicas)


def join(host: str, port: int) -> str:
    """Return `host:port`, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def kv_events_of(text: str, replica: int) -> str:
    """Return --kv-events-config for replica number `replica`, counted from 0. As in vLLM, the ports are those of the
    first replica, plus one for each further replica. The path of an ipc endpoint gets the replica's number as a
    suffix. An endpoint that a consumer binds stays as it is. Text that cannot be parsed is returned unchanged, and the
    scheduler reports its error."""
    try:
        config = json.loads(text)
    except (ValueError, RecursionError):
        return text
    if not isinstance(config, dict) or not replica:
        return text
    endpoint, bind = config.get("endpoint", _KV_EVENTS_ENDPOINT), config.get("bind")
    if not isinstance(endpoint, str):
        return text
    if bind is None:
        bind = "*" in endpoint or "::" in endpoint or endpoint.startswith("ipc://") or endpoint == _KV_EVENTS_ENDPOINT
    if bind:
        config |= {"endpoint": _shifted(endpoint, replica), "bind": True}
    if isinstance(replay := config.get("replay_endpoint"), str):
        config["replay_endpoint"] = _shifted(replay, replica)
    return json.dumps(config)


def _shifted(endpoint: str, by: int) -> str:
    found = _TCP.fullmatch(endpoint)
    if found:
        return f"{found[1]}:{int(found[2]) + by}"
    return f"{endpoint}_{by}" if endpoint.startswith("ipc://") else endpoint
