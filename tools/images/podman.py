"""Runs podman: with runc and without systemd, unless CONTAINERS_CONF says how."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

_SETTINGS: Final = Path(__file__).with_name("containers.conf")


def environment() -> dict[str, str]:
    """Return the environment of podman and of programs that call it."""
    return {"CONTAINERS_CONF": str(_SETTINGS), **os.environ}


def podman(*arguments: str, timeout_s: float = 120.0, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run podman and return its output. Raises CalledProcessError, with the output as a note."""
    command = ["podman", *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=timeout_s, check=False, env=environment(), errors="replace"
    )
    if check and done.returncode:
        error = subprocess.CalledProcessError(done.returncode, command, done.stdout, done.stderr)
        error.add_note(done.stdout[-2000:] + done.stderr[-4000:])
        raise error
    return done


def podman_aloud(*arguments: str, timeout_s: float) -> None:
    """Run podman with its output on this terminal. Raises CalledProcessError."""
    subprocess.run(["podman", *arguments], timeout=timeout_s, check=True, env=environment())


def inspect(container: str) -> dict[str, Any]:
    """Return podman's record of a container."""
    (found,) = json.loads(podman("container", "inspect", container).stdout)
    return dict(found)


def address_of(container: str) -> str:
    """Return the first address of a container on its bridge networks; empty if it has none because it has ended."""
    networks: Mapping[str, Mapping[str, Any]] = inspect(container)["NetworkSettings"]["Networks"]
    return next((str(each["IPAddress"]) for each in networks.values() if each["IPAddress"]), "")


def process_of(container: str) -> int:
    """Return the pid of the container's first process on this host; 0 while it does not run."""
    return int(inspect(container)["State"]["Pid"])


def volume_folder(name: str) -> Path:
    """Return the folder of a volume's files on this host."""
    return Path(json.loads(podman("volume", "inspect", name).stdout)[0]["Mountpoint"])


def image_exists(name: str) -> bool:
    """Whether podman has the image."""
    return podman("image", "exists", name, check=False).returncode == 0


def image_bytes(name: str) -> int:
    """Return the size of an image with all of its layers."""
    return int(json.loads(podman("image", "inspect", name).stdout)[0]["Size"])


def remove_containers(names: Sequence[str]) -> None:
    """Remove containers, also running ones, and their anonymous volumes. A container that does not exist is not an
    error."""
    if names:
        podman("rm", "--force", "--volumes", "--ignore", "--time", "1", *names, check=False)
