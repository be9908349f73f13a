"""`quire status`: shows which parts of a stack run, where, and which resources they use."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

from quire.cli.arguments import stack_arguments
from quire.cli.output.terminal import paint, table

HELP = "show what runs"
_LEAST_WATCH_S = 0.1
_COLUMNS = ("phase", "pid", "grpc_port", "resident_mb", "restarts", "detail")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments: the stack's name, --json for programs, and --watch with its interval."""
    stack_arguments.add_name(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "-w", "--watch", type=float, nargs="?", const=1.0, metavar="S", help="again every S seconds (1), until Ctrl-C"
    )


def run(args: argparse.Namespace) -> int:
    """Print the state of the stack once or, with --watch, every S seconds (at least 0.1) until Ctrl-C comes between two
    looks (one during a look passes on); a terminal is cleared each time. Returns exit code 0 if everything was ready at
    the last look, else 1."""
    if args.watch is None:
        return _show(args)
    while True:
        if sys.stdout.isatty():
            print("\x1b[H\x1b[2J", end="")
        code = _show(args)
        sys.stdout.flush()
        try:
            time.sleep(max(args.watch, _LEAST_WATCH_S))
        except KeyboardInterrupt:
            return code


def _show(args: argparse.Namespace) -> int:
    """Print the stack's addresses, and a table of its members with phase, pid, port, memory and restarts, or all as
    JSON. A member whose process has ended is `exited`, or `failed` if it is not started again. Returns 0 if the stack
    and every member are ready, else 1, also if the stack does not run."""
    from quire.local.state import StateDirectory

    state = StateDirectory(args.name).read()
    if state is None or not state.supervisor.alive():
        report = {"name": args.name, "phase": "not running", "services": {}}
        print(json.dumps(report) if args.json else f"{args.name}: not running. `quire up` starts it.")
        return 1
    services = {}
    for name, service in reversed(state.services.items()):
        alive = service.process.alive()
        services[name] = {
            "phase": service.phase if alive or service.phase == "failed" else "exited",
            "pid": service.pid,
            "grpc_port": service.port,
            "resident_mb": _resident_mb(service.pid) if alive else 0.0,
            "restarts": service.restarts,
            "detail": service.detail,
        }
    report = {
        "name": state.name,
        "phase": state.phase,
        "model": state.model,
        "http": state.http,
        "grpc": state.grpc,
        "supervisor_pid": state.supervisor.pid,
        "services": services,
    }
    if args.json:
        print(json.dumps(report, indent=1))
    else:
        print(f"{paint(state.name, 'bold')}: {state.phase}, {state.http} (gRPC {state.grpc}), model {state.model}\n")
        rows = [
            [name, *(f"{s[column]:.0f}" if column == "resident_mb" else str(s[column]) for column in _COLUMNS)]
            for name, s in services.items()
        ]
        print(table(["service", "phase", "pid", "gRPC port", "MB", "restarts", ""], rows, right=(2, 3, 4, 5)))
    well = state.phase == "ready" and all(s["phase"] == "ready" for s in services.values())
    return 0 if well else 1


def _resident_mb(pid: int) -> float:
    """Return the process's resident memory in MB; 0.0 if /proc does not have it."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
    except (OSError, IndexError, ValueError):
        return 0.0
    return round(pages * os.sysconf("SC_PAGE_SIZE") / 1e6, 1)
