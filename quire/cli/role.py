"""`quire role`: shows the roles of a stack's replicas, and changes the role of one of them while the stack runs."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from quire.cli.arguments import stack_arguments
from quire.cli.output.terminal import table

if TYPE_CHECKING:
    from quire.local.state import StackState
    from quire.v1 import scheduler_pb2

HELP = "show what replicas are for, or give one another role"
ROLES = ("prefill", "decode", "both")
_HEADER = ["scheduler", "role", "running", "waiting", "lends"]
_LOOK_S = 5.0
# After the time that requests have to end, for the answer.
_ANSWER_S = 5.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments: the scheduler and its new role (without them, the command only shows), the stack's name, and
    the time limit."""
    parser.add_argument("scheduler", nargs="?", help="whose role changes (scheduler-prefill-1); none: show all")
    parser.add_argument("role", nargs="?", choices=ROLES, help="its new role, until it is restarted")
    stack_arguments.add_name(parser)
    parser.add_argument(
        "--timeout",
        type=float,
        default=30.0,
        metavar="S",
        help="for requests that the new role is not meant for, before they go on elsewhere (default: %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    """Print a table of all replicas with role and load or, if one is named, change its role until it is restarted, and
    print the former role and how many requests had to leave. Returns exit code 0. Raises FailedPrecondition if the
    stack does not run, InvalidArgument for an unknown scheduler or no role, and the scheduler's errors."""
    from quire.errors import FailedPrecondition, InvalidArgument
    from quire.local.state import StateDirectory

    state = StateDirectory(args.name).running()
    if state is None:
        raise FailedPrecondition("NOT_RUNNING", f"No stack named {args.name!r} runs here.", "Start one: `quire up`.")
    schedulers = [name for name in state.services if name.startswith("scheduler")]
    if args.scheduler is None:
        rows = [[name, *_row(_load(state, name))] for name in schedulers]
        print(table(_HEADER, rows, right=(2, 3, 4)))
        return 0
    if args.scheduler not in schedulers:
        fix = f"Choose of {', '.join(schedulers)}."
        raise InvalidArgument("UNKNOWN_SCHEDULER", f"There is no scheduler {args.scheduler!r}.", fix)
    if args.role is None:
        raise InvalidArgument("NO_ROLE", "Say which role.", f"Choose of {', '.join(ROLES)}.")
    answer = _set(state, args.scheduler, args.role, args.timeout)
    moved = f"; {answer.aborted} requests had to leave" if answer.aborted else ""
    print(f"{args.scheduler}: {args.role}, was {answer.former_role}{moved}")
    return 0


def _set(state: StackState, name: str, role: str, timeout_s: float) -> scheduler_pb2.SetRoleResponse:
    """Ask a scheduler to take a role, wait for its answer, and return it. Requests that the role is not meant for have
    `timeout_s` to end; those left then go elsewhere. Raises the scheduler's typed error, Unavailable if it cannot be
    reached, or DeadlineExceeded if it does not answer within `timeout_s` and 5 s more."""
    import grpc

    from quire.local.service_tls import sync_channel
    from quire.v1 import scheduler_pb2, scheduler_pb2_grpc
    from quire.wire import read_error

    request = scheduler_pb2.SetRoleRequest(role=role, drain_timeout_ms=max(1, round(timeout_s * 1e3)))
    address = _address(state, name)
    with sync_channel(address, "scheduler", state.tls_folder) as channel:
        stub = scheduler_pb2_grpc.SchedulerStub(channel)
        try:
            answer: scheduler_pb2.SetRoleResponse = stub.SetRole(request, timeout=timeout_s + _ANSWER_S)
        except grpc.RpcError as error:
            raise read_error(error, address) from None
    return answer


def _load(state: StackState, name: str) -> scheduler_pb2.Load | None:
    """Return a scheduler's present load; None if it answers with an error, or not within 5 s."""
    import grpc

    from quire.local.service_tls import sync_channel
    from quire.v1 import scheduler_pb2, scheduler_pb2_grpc

    with sync_channel(_address(state, name), "scheduler", state.tls_folder) as channel:
        loads = scheduler_pb2_grpc.SchedulerStub(channel).WatchLoad(scheduler_pb2.WatchLoadRequest(), timeout=_LOOK_S)
        try:
            load: scheduler_pb2.Load | None = next(iter(loads), None)
        except grpc.RpcError:
            load = None
        finally:
            loads.cancel()
    return load


def _row(load: scheduler_pb2.Load | None) -> list[str]:
    """Return the cells of a replica's row: role, running and waiting requests, open transfers. None, for a scheduler
    that did not answer, gives "no answer" and empty cells."""
    if load is None:
        return ["no answer", "", "", ""]
    return [load.role, *map(str, (load.running, load.waiting, load.open_transfers))]


def _address(state: StackState, name: str) -> str:
    """Return the local address of the member's gRPC port."""
    from quire.local.spec import LOOPBACK

    return f"{LOOPBACK}:{state.services[name].port}"
