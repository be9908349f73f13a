"""The commands, in the order of `quire --help`. A command is a module of this package with the names of Command."""

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
    """`run` gets the parsed arguments and returns the exit code."""

    HELP: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare flags."""

    def run(self, args: argparse.Namespace) -> int:
        """Do it. A QuireError becomes the headline and exit code 1."""


def load(name: str) -> Command:
    """Modules import what is heavy inside `run`, so that `--help` is instant."""
    folder = f"{_FOLDERS[name]}." if name in _FOLDERS else ""
    return cast(Command, importlib.import_module(f"quire.cli.{folder}{name.replace('-', '_')}"))
