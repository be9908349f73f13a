"""`quire restart`: restarts services in turn, while the others go on."""

from __future__ import annotations

import argparse

from quire.cli.arguments import stack_arguments

HELP = "restart services, one after the other"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments: the services or --rolling, the stack's name, and the time limit to drain and to get ready.
    --rolling leaves out the router. `run` refuses both services and --rolling, or neither."""
    parser.add_argument("service", nargs="*", help="a service (all of its kind, in turn), or one of several (worker-2)")
    parser.add_argument(
        "--rolling", action="store_true", help="every replica and tokenizer, and the kvstore, in turn; not the router"
    )
    stack_arguments.add_name(parser)
    parser.add_argument(
        "--timeout", type=float, default=60.0, metavar="S", help="to drain, and to get ready (default: %(default)s)"
    )


def run(args: argparse.Namespace) -> int:
    """Restart the named services in turn or, with --rolling, every replica, tokenizer and the kvstore, and print a line
    for each. Returns exit code 0 when all serve again. Raises InvalidArgument for unknown names, and for both or
    neither of names and --rolling. Raises FailedPrecondition if the stack is not ready or ends meanwhile,
    DeadlineExceeded if a member is not ready in time."""
    from quire.errors import FailedPrecondition, InvalidArgument
    from quire.local.rolling import Rolling, rolling_turns, turns_of
    from quire.local.spec import service_of
    from quire.local.state import StateDirectory

    if bool(args.service) == args.rolling:
        raise InvalidArgument("NOTHING_TO_RESTART", "Say what to restart.", "Name services, or give --rolling.")
    directory = StateDirectory(args.name)
    state = directory.running()
    if state is None:
        raise FailedPrecondition("NOT_RUNNING", f"No stack named {args.name!r} runs here.", "Start one: `quire up`.")
    if args.rolling and len(set(map(service_of, state.services))) == len(state.services):
        print("There is one of each service: requests that come meanwhile wait or fail.", flush=True)
    turns = rolling_turns(state) if args.rolling else turns_of(state, args.service)
    Rolling(directory, args.timeout, lambda line: print(line, flush=True)).run(turns)
    return 0
