"""`quire pull NAME`: fetch a model of the catalogue, with a bar."""

from __future__ import annotations

import argparse

HELP = "fetch a model of `quire models`"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which one."""
    parser.add_argument("name", help="name of the model")


def run(args: argparse.Namespace) -> int:
    """Fetch the named model unless it is there, and print where its file is."""
    from quire.models import named_model, pull_with_bar

    print(pull_with_bar(named_model(args.name)))
    return 0
