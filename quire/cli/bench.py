"""`quire bench KIND`: the benchmarks. Each kind is a module of `quire.cli.benches`."""

from __future__ import annotations

import argparse
import importlib
from typing import cast

from quire.cli.registry import Command

HELP = "measure"
KINDS = ("serve", "latency", "throughput", "startup")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add a subcommand for each kind of benchmark, with arguments of its own."""
    kinds = parser.add_subparsers(dest="kind", metavar="KIND", required=True)
    for name in KINDS:
        kind = load(name)
        added = kinds.add_parser(name, help=kind.HELP, description=kind.__doc__, allow_abbrev=False)
        kind.add_arguments(added)


def run(args: argparse.Namespace) -> int:
    """Run the kind of benchmark that `args.kind` names, and return its exit code."""
    return load(args.kind).run(args)


def load(name: str) -> Command:
    """A kind by its name."""
    return cast(Command, importlib.import_module(f"quire.cli.benches.{name}"))
