"""Flags that select the Quire a command talks to: an address, or a stack that runs on this machine."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from quire.cli.arguments import stack_arguments
from quire.client import Client
from quire.errors import FailedPrecondition


def add_connection_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that select a running Quire: `--address` or `--name`, `--api-key`, `--tls-ca` and
    `--tls-server-name`. --address wins over --name."""
    parser.add_argument("--address", metavar="HOST:PORT", help="gRPC address (default: the stack that runs here)")
    stack_arguments.add_name(parser)
    parser.add_argument("--api-key", metavar="KEY", help="credential (default: the variable QUIRE_API_KEY)")
    parser.add_argument("--tls-ca", metavar="FILE", help="PEM authority of the router's certificate; turns TLS on")
    parser.add_argument(
        "--tls-server-name", metavar="NAME", help="name in the router's certificate (default: the host of the address)"
    )


def connect(args: argparse.Namespace) -> Client:
    """Open a client of the selected Quire. Raises the errors of `find_server`, and NotFound if the authority's file
    cannot be read."""
    address, tls_ca, name = find_server(args)
    return Client(address, api_key=api_key(args), tls_ca=tls_ca, tls_server_name=name)


def api_key(args: argparse.Namespace) -> str | None:
    """Return the credential, if there is one."""
    return args.api_key or os.environ.get("QUIRE_API_KEY")


def find_server(args: argparse.Namespace) -> tuple[str, str | None, str | None]:
    """Return the selected Quire's gRPC address, the path of the PEM file with its authority (None: no TLS), and the
    name in its certificate (None: the address's host). With --address, path and name are those of --tls-ca and
    --tls-server-name; without --tls-ca, no TLS is used. Otherwise, the running stack called --name is selected. If this
    stack serves TLS and --tls-ca is not given, path and name are those of its own TLS folder. Raises FailedPrecondition
    if no such stack runs, or if it serves TLS without such a folder and --tls-ca is not given."""
    from quire.local.service_tls import PUBLIC_CA, PUBLIC_NAME
    from quire.local.state import StateDirectory

    if args.address:
        return str(args.address), args.tls_ca, args.tls_server_name
    state = StateDirectory(args.name).running()
    if state is None:
        raise FailedPrecondition(
            "NOT_RUNNING", f"No stack named {args.name!r} runs here.", "Start one with `quire up`, or give --address."
        )
    if args.tls_ca or not state.http.startswith("https:"):
        return state.grpc, args.tls_ca, args.tls_server_name
    if not state.tls_folder:
        raise FailedPrecondition(
            "TLS_CA_MISSING",
            f"The stack {args.name!r} serves with TLS.",
            "Give the authority of its certificate with --tls-ca, and a name in it with --tls-server-name.",
            param="tls_ca",
        )
    return state.grpc, str(Path(state.tls_folder) / PUBLIC_CA), PUBLIC_NAME
