"""Flags that describe a stack, shared by `up` and `serve`, and the StackSpec that they result in."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

from quire.channel import bearer
from quire.engine_options import ENGINE_OPTIONS, OPTION_NAMES, stack_flags
from quire.errors import InvalidArgument
from quire.local.service_tls import check_folder
from quire.local.spec import LOOPBACK, SERVICES, StackSpec
from quire.local.state import DEFAULT_NAME
from quire.models import default_model, find_model
from quire.vllm_options import VLLM_OPTIONS

DEFAULT_PORT = 8000


def add_name(parser: argparse.ArgumentParser) -> None:
    """Add `--name`, for every command about a stack."""
    parser.add_argument("--name", default=DEFAULT_NAME, help="name of the stack (default: %(default)s)")


def add_stack_arguments(parser: argparse.ArgumentParser) -> None:
    """Add all flags of a stack except the model and the port, which differ between commands."""
    add_name(parser)
    parser.add_argument("--host", default=LOOPBACK, help="address of the HTTP and gRPC servers (default: %(default)s)")
    parser.add_argument("--grpc-port", type=int, default=0, metavar="N", help="port of gRPC (default: a free one)")
    parser.add_argument("--api-key", action="append", default=[], metavar="KEY", help="credential; may be repeated")
    parser.add_argument(
        "--tls-folder",
        default="",
        metavar="FOLDER",
        help="certificates that `quire certs` made: mutual TLS between services, TLS on the public ports",
    )
    parser.add_argument(
        "--shutdown-timeout", type=float, default=30.0, metavar="S", help="time to drain (default: %(default)s)"
    )
    parser.add_argument(
        "--start-timeout", type=float, default=900.0, metavar="S", help="time to get ready (default: %(default)s)"
    )
    parser.add_argument(
        "--replicas",
        type=int,
        metavar="N",
        help="pairs of scheduler and worker (default: 1, beside roles 0)",
    )
    parser.add_argument(
        "--prefill",
        type=int,
        default=0,
        metavar="N",
        help="pairs that compute prompts (default: %(default)s)",
    )
    parser.add_argument(
        "--decode", type=int, default=0, metavar="N", help="pairs that take prompts over (default: %(default)s)"
    )
    parser.add_argument("--tokenizers", type=int, default=1, metavar="N", help="(default: %(default)s)")
    engine = parser.add_argument_group("engine", "vLLM's names; the services' own defaults")
    add_engine_options(engine)


def add_engine_options(group: argparse._ArgumentGroup) -> None:
    """Add a flag for each engine option; switches get a `--no-` form. Options of vLLM are added too, without an entry
    in --help; `stack_flags` translates them or refuses them with a reason."""
    for option in ENGINE_OPTIONS:
        if option.switch:
            group.add_argument(f"--{option.name}", action=argparse.BooleanOptionalAction, help=option.help)
        else:
            group.add_argument(f"--{option.name}", metavar=option.metavar, help=option.help)
    for known in VLLM_OPTIONS:
        # Not in --help, where they would hide what has an effect: docs/vllm-options.md lists them.
        names = (f"--{known.name}", *(f"-{alias}" for alias in known.aliases))
        if known.switch:
            group.add_argument(*names, action=argparse.BooleanOptionalAction, help=argparse.SUPPRESS)
        else:
            group.add_argument(*names, help=argparse.SUPPRESS)


def given_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the engine options that were given, by name."""
    options = {name: getattr(args, name.replace("-", "_")) for name in OPTION_NAMES}
    return {name: value for name, value in options.items() if value is not None}


def stack_spec(args: argparse.Namespace, *, model: str | None, port: int, owned: bool, fetch: bool = True) -> StackSpec:
    """Return the spec of the stack that the flags describe, with the path of its model and this HTTP port. First the
    flags are checked; then the model (default: the catalogue's) is downloaded if needed. Without `fetch`, only a named
    model of the catalogue is downloaded. Without a served name among the flags, clients call the model as `model` does.
    `owned`: the stack ends with the process that starts it. Raises InvalidArgument or Unsupported for unknown or
    refused options, an incomplete TLS folder, numbers of members and ports that StackSpec refuses, and an API key that
    is empty, has a comma or cannot be sent, and the errors of `find_model`. The services check most values, when they
    start."""
    for key in args.api_key:
        _check_api_key(key)
    if args.tls_folder:
        check_folder(args.tls_folder, SERVICES)
    # Refused, where it cannot be, before a model is fetched.
    shape = StackSpec(
        name=args.name,
        model="",
        host=args.host,
        port=port,
        grpc_port=args.grpc_port,
        api_keys=tuple(args.api_key),
        tls_folder=args.tls_folder and str(Path(args.tls_folder).absolute()),
        owned=owned,
        replicas=args.replicas if args.replicas is not None else int(not (args.prefill or args.decode)),
        prefill=args.prefill,
        decode=args.decode,
        tokenizers=args.tokenizers,
        start_timeout_s=args.start_timeout,
        drain_timeout_s=args.shutdown_timeout,
    )
    options = given_options(args)
    stack_flags(options)
    hub = (options.get("revision", ""), options.get("download-dir", ""))
    name, path = (model, find_model(model, *hub, fetch=fetch)) if model is not None else default_model(fetch=fetch)
    # As in vLLM, a model is called what it was called here.
    options["served-model-name"] = options.get("served-model-name") or name
    return replace(shape, model=str(path), flags=stack_flags(options))


def _check_api_key(key: str) -> None:
    """Raise InvalidArgument for a key that is empty or has a comma, or that clients cannot send in a header. A shell
    makes an empty key of a variable that is not set, and without keys every caller is admitted."""
    if not key.strip():
        raise InvalidArgument(
            "BAD_API_KEY", "An API key is empty.", "Give a key, or leave out --api-key to let everybody in."
        )
    if "," in key:
        raise InvalidArgument("BAD_API_KEY", "An API key has a comma.", "Repeat --api-key for several keys.")
    bearer(key)  # Raises for a key that a header cannot hold.
