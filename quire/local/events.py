"""The events that a supervisor sends to its owner, the process that started it. Each event is plain data, sent as one
line of JSON. This module knows nothing of how events are shown."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Progress:
    """A service has entered a phase, or has made progress in it. `progress` is the share of the phase that is done,
    from 0 to 1; -1 if it is not known."""

    service: str
    phase: str
    seconds: float
    progress: float = -1.0
    detail: str = ""


@dataclass(frozen=True)
class Ready:
    """All services of the stack serve."""

    http: str
    grpc: str
    seconds: float


@dataclass(frozen=True)
class Failed:
    """The stack did not start, or a service ended that it cannot do without. No process that this supervisor started is
    left running. `service` is empty if no service is the cause."""

    service: str
    code: str
    message: str
    fix: str
    log: str


@dataclass(frozen=True)
class Died:
    """A service of a ready stack has ended; the other services go on. A new process replaces it after `restart_in_s`
    seconds; a negative value means that the service is given up, until `quire restart` or a SIGHUP to the supervisor
    asks for another start. The stack ends if it cannot serve without the service."""

    service: str
    code: str
    message: str
    fix: str
    log: str
    restart_in_s: float = -1.0


@dataclass(frozen=True)
class Restarted:
    """A service that had ended serves again, for the `restarts`th time."""

    service: str
    restarts: int


@dataclass(frozen=True)
class Stopped:
    """No process of the stack runs any more. `killed` has the services that did not drain in time and were killed."""

    seconds: float
    killed: tuple[str, ...] = ()


Event = Progress | Ready | Failed | Died | Restarted | Stopped
_KINDS: dict[str, type[Event]] = {
    cls.__name__.lower(): cls for cls in (Progress, Ready, Failed, Died, Restarted, Stopped)
}


def encode(event: Event) -> str:
    """Encode an event as one line, without its line feed."""
    return json.dumps({"event": type(event).__name__.lower(), **asdict(event)})


def decode(line: str) -> Event | None:
    """Decode a line of `encode`; None for a line that is not a JSON object or names no known event. Raises TypeError
    for a field that this event does not have, and for a missing one without a default."""
    try:
        values = json.loads(line)
        cls = _KINDS[values.pop("event")]
    except (ValueError, KeyError, AttributeError, TypeError):
        return None
    if "killed" in values:
        values["killed"] = tuple(values["killed"])
    return cls(**values)
