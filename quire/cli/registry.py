"""The commands, in the order of `quire --help`. A command is a module of this package with the attributes of
Command."""

from __future__ import annotations

import argparse
import importlib
from typing import Protocol, cast

NAMES = (
    "demo",
    "demo-pd",
    "up",
    "down",
    "restart",
    "role",
    "status",
    "logs",
    "models",
    "pull",
    "doctor",
    "config",
    "serve",
    "chat",
    "complete",
    "run-batch",
    "bench",
    "plan",
    "profile",
    "key",
    "certs",
)
# Commands whose modules are in a subfolder.
_FOLDERS = {"key": "credentials", "certs": "credentials"}


class Command(Protocol):
    """A command. `run` gets the parsed arguments and returns the exit code."""

    HELP: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the command's arguments to its parser."""

    def run(self, args: argparse.Namespace) -> int:
        """Run the command and return the exit code. A QuireError is printed, and the exit code is then 1."""


def load(name: str) -> Command:
    """Import the module of a command and return it. Modules import large packages inside `run`, so that `--help` is
    fast."""
    folder = f"{_FOLDERS[name]}." if name in _FOLDERS else ""
    return cast(Command, importlib.import_module(f"quire.cli.{folder}{name.replace('-', '_')}"))
