"""`quire pull NAME`: downloads a model of the catalogue or of the Hugging Face hub, with a progress bar."""

from __future__ import annotations

import argparse

HELP = "fetch a model of `quire models`, or of the Hugging Face hub"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the argument: the name of the model."""
    parser.add_argument("name", help="name of `quire models`, or org/name of the hub")
    parser.add_argument("--revision", default="", help="branch, tag or commit of a model of the hub (default: main)")
    parser.add_argument("--download-dir", default="", metavar="FOLDER", help="cache of the hub (default: of HF_HOME)")


def run(args: argparse.Namespace) -> int:
    """Fetch the named model, of the hub or of the catalogue, unless it is there, and print its path. Returns exit code
    0. Raises InvalidArgument for a malformed revision of a model of the hub (for the catalogue, --revision and
    --download-dir have no effect), NotFound for an unknown name, Unavailable if the download fails, and the errors of
    `find_hub_model`."""
    from quire.hub.cache import parse_hub_name
    from quire.models import hub_model_with_bar, named_model, pull_with_bar

    model = parse_hub_name(args.name, args.revision, args.download_dir)
    print(hub_model_with_bar(model) if model is not None else pull_with_bar(named_model(args.name)))
    return 0
