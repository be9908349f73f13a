"""Parses and checks the option --kv-events-config, whose form is vLLM's JSON. Names, meanings and defaults are those of
vLLM, except for the default endpoint. This one can be reached only from this machine, because events carry prompts
unencrypted to every client that connects."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, fields
from typing import Any

from quire_common.errors import ConfigError

_OPTION = "kv_events_config"
_PUBLISHERS = ("null", "zmq")
# ZeroMQ counts messages in int32, and the queue for replays is four times as long as the list of kept batches.
MOST_QUEUED = 2**28
_TCP = "tcp://"
# The endpoint may begin with a source address and a semicolon.
_TCP_HOST = re.compile(r"tcp://(?:[^;]*;)?([^;]*):[^:;]*")
# ZeroMQ has more transports. They can reach other hosts, and no rule here checks these hosts.
_TRANSPORTS = (_TCP, "ipc://", "inproc://")


@dataclass(frozen=True)
class KvEventsConfig:
    """The checked option. `bind` is not an option of vLLM. If it is None, vLLM's rule applies: endpoints with * or ::,
    ipc and inproc are bound, and the scheduler connects to all others; the default endpoint is bound too."""

    enable_kv_cache_events: bool = False
    publisher: str = "zmq"
    endpoint: str = "tcp://127.0.0.1:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""
    bind: bool | None = None

    @property
    def enabled(self) -> bool:
        """Whether anything is published."""
        return self.enable_kv_cache_events and self.publisher == "zmq"

    @property
    def binds(self) -> bool:
        """Whether this scheduler binds the endpoint; else a consumer does, and the scheduler connects to it. If `bind`
        does not say, the default endpoint, ipc, inproc, and endpoints with * or :: are bound."""
        if self.bind is not None:
            return self.bind
        anywhere = "*" in self.endpoint or "::" in self.endpoint
        return anywhere or self.endpoint.startswith(("ipc://", "inproc://")) or self.endpoint == KvEventsConfig.endpoint

    @property
    def listens_on(self) -> list[str]:
        """The hosts on which TCP ports are opened."""
        return _tcp_hosts(([self.endpoint] if self.binds else []) + [self.replay_endpoint or ""])

    @property
    def connects_to(self) -> list[str]:
        """The hosts to which events are sent over TCP."""
        return _tcp_hosts([] if self.binds else [self.endpoint])


_FIELDS = {field.name: field.type for field in fields(KvEventsConfig)}
_KINDS: dict[str, tuple[type, ...]] = {
    "bool": (bool,),
    "str": (str,),
    "int": (int,),
    "str | None": (str, type(None)),
    "bool | None": (bool, type(None)),
}


def _tcp_hosts(endpoints: list[str]) -> list[str]:
    """Return the host of each TCP endpoint; empty where none can be read, which is no loopback address either."""
    tcp = [endpoint for endpoint in endpoints if endpoint.startswith(_TCP)]
    return [found[1].strip("[]") if (found := _TCP_HOST.fullmatch(endpoint)) else "" for endpoint in tcp]


def parse_kv_events_config(text: str) -> KvEventsConfig:
    """Parse and check the option's JSON; '' means that nothing is published, and a publisher of null counts as left
    out. Raises ConfigError if it is not a JSON object, or has an unknown field or a bad value."""
    if not text:
        return KvEventsConfig()
    try:
        values = json.loads(text)
    except ValueError as error:
        raise _bad(f"it is not JSON: {error}") from None
    except RecursionError:
        raise _bad("it is nested too deeply") from None
    if not isinstance(values, dict):
        raise _bad("it is not a JSON object")
    for name, value in values.items():
        _check(name, value)
    if values.get("publisher", "") is None:
        del values["publisher"]
    return KvEventsConfig(**values)


def _check(name: str, value: Any) -> None:
    """Raise ConfigError for an unknown field, a value of the wrong type (null is allowed for `publisher` too), an
    unknown publisher, a number that is not from 1 to MOST_QUEUED, or an endpoint whose transport is not supported."""
    if name not in _FIELDS:
        raise _bad(f"{name!r} is unknown; supported: {', '.join(_FIELDS)}")
    kinds = _KINDS[str(_FIELDS[name])]
    optional = name == "publisher" and value is None
    if not optional and (not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds)):
        raise _bad(f"{name} is {json.dumps(value)}, not {_FIELDS[name]}")
    if name == "publisher" and not optional and value not in _PUBLISHERS:
        raise _bad(f"publisher {value!r} is unknown; supported: {', '.join(_PUBLISHERS)}")
    if isinstance(value, int) and not isinstance(value, bool) and value < 1:
        raise _bad(f"{name} is {value}, not at least 1")
    if isinstance(value, int) and value > MOST_QUEUED:
        raise _bad(f"{name} is {value}, more than {MOST_QUEUED}")
    if name.endswith("endpoint") and value is not None and not value.startswith(_TRANSPORTS):
        raise _bad(f"{name} {value!r} has no transport that is supported: {', '.join(_TRANSPORTS)}")


def _bad(what: str) -> ConfigError:
    """Return the ConfigError that says what is wrong with the option."""
    return ConfigError(
        "BAD_VALUE",
        f"--kv-events-config is of no use: {what}.",
        'Give JSON such as {"enable_kv_cache_events": true, "endpoint": "tcp://*:5557"}.',
        param=_OPTION,
    )
