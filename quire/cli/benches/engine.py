"""The common part of benchmarks that drive an engine through LLM. They start their own stack, or use one at an
address."""

from __future__ import annotations

import argparse
import random
from typing import TYPE_CHECKING

from quire.cli.arguments.connection import api_key
from quire.cli.arguments.stack_arguments import add_engine_options, given_options
from quire.errors import InvalidArgument

if TYPE_CHECKING:
    from quire.llm import LLM
    from quire.outputs import ModelCard


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments: the model or the address, the credential, and the options of the benchmark's own stack."""
    parser.add_argument("--model", help="folder of the model (default: the demo model of the source)")
    parser.add_argument("--address", metavar="HOST:PORT", help="gRPC address; default: a stack of its own")
    parser.add_argument("--api-key", metavar="KEY", help="credential (default: the variable QUIRE_API_KEY)")
    parser.add_argument("--replicas", type=int, default=1, metavar="N", help="of a stack of its own")
    engine = parser.add_argument_group("engine", "options of a stack of its own")
    add_engine_options(engine)


def open_llm(args: argparse.Namespace) -> LLM:
    """Return an LLM: with a stack started for it, or for the Quire at --address. Raises the typed errors of a start."""
    from quire.llm import LLM

    return LLM(args.model, address=args.address, api_key=api_key(args), replicas=args.replicas, **given_options(args))


def model_of(llm: LLM, args: argparse.Namespace) -> ModelCard:
    """Return the first model that the LLM's Quire serves, by a client that is closed again. Raises Unavailable if the
    router lists no model."""
    from quire.client import Client
    from quire.llm import first_card

    with Client(llm.address, api_key=api_key(args)) as client:
        return first_card(client.models())


def random_prompt(numbers: random.Random, length: int, vocabulary: int) -> list[int]:
    """Make a prompt of random token ids."""
    return [numbers.randrange(vocabulary) for _ in range(length)]


def at_least_one(args: argparse.Namespace, *names: str) -> None:
    """Raise InvalidArgument if one of these flags is less than 1."""
    for name in names:
        if getattr(args, name) < 1:
            raise InvalidArgument("BAD_VALUE", f"--{name.replace('_', '-')} is less than 1.", "Give at least 1.")
