"""What a supervisor tells its owner, one JSON line each. Plain data; says nothing of how it is shown."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Progress:
    """A service moved on. `progress` is 0..1 of the phase, -1 where there is no measure."""

    service: str
    phase: str
    seconds: float
    progress: float = -1.0
    detail: str = ""


@dataclass(frozen=True)
class Ready:
    """Everything serves."""

    http: str
    grpc: str
    seconds: float


@dataclass(frozen=True)
class Failed:
    """The stack did not start, or lost a service for good; nothing of it is left running. `service` is empty where none
    is to blame."""

    service: str
    code: str
    message: str
    fix: str
    log: str


@dataclass(frozen=True)
class Died:
    """A service ended while serving; the others go on. Another takes its place after `restart_in_s`; below 0: none."""

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
    """Nothing of the stack runs any more. `killed` are the services that outlasted their time to drain."""

    seconds: float
    killed: tuple[str, ...] = ()


Event = Progress | Ready | Failed | Died | Restarted | Stopped
_KINDS: dict[str, type[Event]] = {
    cls.__name__.lower(): cls for cls in (Progress, Ready, Failed, Died, Restarted, Stopped)
}


def encode(event: Event) -> str:
    """One line, without its end."""
    return json.dumps({"event": type(event).__name__.lower(), **asdict(event)})


def decode(line: str) -> Event | None:
    """Decode a line that `encode` made; None for a line that is no event."""
    try:
        values = json.loads(line)
        cls = _KINDS[values.pop("event")]
    except (ValueError, KeyError, AttributeError, TypeError):
        return None
    if "killed" in values:
        values["killed"] = tuple(values["killed"])
    return cls(**values)
