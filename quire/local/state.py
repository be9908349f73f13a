"""StateDirectory: the directory of a stack, with its logs, its state file, and the lock that its supervisor holds.

Readers need only the files, so `status`, `logs` and `down` work without the supervisor's help.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from quire.errors import FailedPrecondition, InvalidArgument
from quire.local.pids import ProcessId

DEFAULT_NAME = "default"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass
class ServiceState:
    """The last known state of one member, which is one process of the stack. `phase` is starting, a phase of loading,
    ready, exited, or failed; a failed member is given up, and is started again only on request (`quire restart`, or
    SIGHUP)."""

    pid: int = 0
    start_time: int = 0
    port: int = 0
    phase: str = "starting"
    detail: str = ""
    # How often another process has taken its place.
    restarts: int = 0

    def enter_phase(self, phase: str, detail: str = "") -> bool:
        """Set phase and detail. Returns whether either has changed."""
        changed = (self.phase, self.detail) != (phase, detail)
        self.phase, self.detail = phase, detail
        return changed

    @property
    def process(self) -> ProcessId:
        """The ProcessId of the member's process."""
        return ProcessId(self.pid, self.start_time)


@dataclass
class StackState:
    """The last known state of a stack, which its supervisor writes. `phase`: starting, ready, stopping, stopped,
    failed."""

    name: str
    stack_id: str
    model: str
    supervisor: ProcessId
    phase: str = "starting"
    http: str = ""
    grpc: str = ""
    # Certificates of the stack; empty: it has none.
    tls_folder: str = ""
    services: dict[str, ServiceState] = field(default_factory=dict)

    def set_addresses(self, http: str, grpc: str) -> None:
        """Set the addresses at which clients reach the stack."""
        self.http, self.grpc = http, grpc

    def enter_phase(self, phase: str) -> None:
        """Set the phase of the whole stack."""
        self.phase = phase

    @classmethod
    def from_json(cls, text: str) -> StackState:
        """Decode a state. Raises ValueError, KeyError, TypeError or AttributeError if the text is no JSON or lacks the
        form of a state. The types of values are not checked."""
        values = json.loads(text)
        values["supervisor"] = ProcessId(**values["supervisor"])
        values["services"] = {name: ServiceState(**service) for name, service in values["services"].items()}
        return cls(**values)


def base_directory() -> Path:
    """Return the folder that contains the directories of all stacks: QUIRE_STATE_DIR, or else `quire` in the user's
    state folder (XDG_STATE_HOME, or ~/.local/state)."""
    override = os.environ.get("QUIRE_STATE_DIR")
    if override:
        return Path(override).absolute()
    home = os.environ.get("XDG_STATE_HOME")
    return (Path(home) if home else Path.home() / ".local" / "state") / "quire"


class StateDirectory:
    """The files of one stack, by its name. Raises InvalidArgument for a name that is not allowed. Nothing is
    created."""

    def __init__(self, name: str = DEFAULT_NAME, base: Path | None = None) -> None:
        if not _NAME.fullmatch(name):
            raise InvalidArgument(
                "BAD_NAME",
                f"{name!r} is not a name for a stack.",
                "Use letters, digits, dots and dashes.",
                param="name",
            )
        self.name = name
        self.path = (base or base_directory()) / name

    @property
    def state_file(self) -> Path:
        """Return the path of the JSON file of StackState."""
        return self.path / "state.json"

    def log(self, service: str) -> Path:
        """Return the path of the log with standard output and error of a service (or `supervisor`)."""
        return self.path / "logs" / f"{service}.log"

    def create(self) -> None:
        """Make the directories; only this user may read them. Raises FailedPrecondition if that is not possible, such
        as in a home folder that this user may not write to."""
        try:
            (self.path / "logs").mkdir(mode=0o700, parents=True, exist_ok=True)
            self.path.chmod(0o700)
        except OSError as error:
            raise FailedPrecondition(
                "STATE_DIRECTORY",
                f"The folder {self.path} for the stack's state and logs cannot be made: {error.strerror}.",
                "Set QUIRE_STATE_DIR to a folder in which this user may make files.",
            ) from error

    def read(self) -> StackState | None:
        """Read the state file. Returns None if there is no such file, or if it is not a valid state."""
        try:
            return StackState.from_json(self.state_file.read_text(encoding="utf-8"))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None

    def write(self, state: StackState) -> None:
        """Replace the state file in one step."""
        temporary = self.state_file.with_suffix(".tmp")
        temporary.write_text(json.dumps(asdict(state), indent=1) + "\n", encoding="utf-8")
        temporary.replace(self.state_file)

    def running(self) -> StackState | None:
        """Return the state if its supervisor runs; otherwise None."""
        state = self.read()
        return state if state is not None and state.supervisor.alive() else None

    def remove(self) -> None:
        """Delete the directory with all files."""
        shutil.rmtree(self.path, ignore_errors=True)

    @contextlib.contextmanager
    def hold_lock(self) -> Iterator[None]:
        """Within the context, hold the lock file of the stack's directory, which is made if needed. Does not wait:
        raises FailedPrecondition ALREADY_RUNNING if another process holds the lock, and the error of `create`."""
        self.create()
        with (self.path / "lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise FailedPrecondition(
                    "ALREADY_RUNNING",
                    f"A stack named {self.name!r} is running or starting.",
                    f"`quire down --name {self.name}` stops it; or choose another --name.",
                ) from error
            yield


def list_names(base: Path | None = None) -> list[str]:
    """Return the names of all stacks that have a state file."""
    return sorted(path.parent.name for path in (base or base_directory()).glob("*/state.json"))
