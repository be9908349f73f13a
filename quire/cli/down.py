"""`quire down`: stops a stack, and checks that nothing of it is left."""

from __future__ import annotations

import argparse

from quire.cli.arguments import stack_arguments

HELP = "stop the services"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments: the stack, and the time limit of the stop."""
    stack_arguments.add_name(parser)
    parser.add_argument("--timeout", type=float, default=30.0, metavar="S", help="time to drain (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Stop the stack, wait for its end as `stop_stack` does with --timeout, and print how long that took and how many
    processes were killed; or print which pids are left. Returns exit code 0, also if nothing ran; 1 if a process of the
    stack is left even after SIGKILL."""
    from quire.local.state import StateDirectory
    from quire.local.stop import stop_stack

    state = StateDirectory(args.name).read()
    if state is None:
        print(f"No stack named {args.name!r} was started here.")
        return 0
    ran = state.supervisor.alive()
    report = stop_stack(state, args.timeout)
    if report.left:
        print(f"The kernel still holds {', '.join(map(str, report.left))}.")
        return 1
    if report.killed:
        print(f"Stopped in {report.seconds:.1f} s; {len(report.killed)} processes had to be killed.")
    else:
        print(f"Stopped in {report.seconds:.1f} s." if ran else "It was not running.")
    return 0
