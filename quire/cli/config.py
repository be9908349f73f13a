"""`quire config`: the value of every option of every service, as it would run here, and the origin of each value.

The command has the flags of `quire serve`. It asks the services themselves, so it shows the values that they would use.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from typing import Any

from quire.cli.arguments.stack_arguments import DEFAULT_PORT, add_stack_arguments, stack_spec
from quire.cli.output.terminal import paint, table

HELP = "explain every option: its value, and where that came from"
_LIMIT_S = 60.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments: one service to show (default: all), --all, --json, and the flags of `quire serve`."""
    parser.add_argument("service", nargs="?", help="one service alone (default: all)")
    parser.add_argument("--model", help="folder of the model (default: as `quire serve`)")
    parser.add_argument("--port", type=int, default=DEFAULT_PORT, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--all", action="store_true", help="also what is left at its default")
    parser.add_argument("--json", action="store_true", help="print JSON, with the meaning of each option")
    add_stack_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Print a table of options for each member of the stack, or of one service if it is named, or all as JSON. The
    program of each service is run with --explain-config and the command line that it would get; none begins to serve.
    Only a named model of the catalogue is downloaded. The table leaves out options at their defaults unless --all is
    given. Raises InvalidArgument for an unknown service or an option that a service refuses, and the errors of
    `stack_spec` and `_ask`. A service of which the stack has no member gets no table."""
    from quire.errors import InvalidArgument
    from quire.local.spec import SERVICES, service_of

    if args.service not in (None, *SERVICES):
        raise InvalidArgument(
            "UNKNOWN_SERVICE", f"There is no {args.service!r}.", f"Choose from {', '.join(SERVICES)}."
        )
    spec = stack_spec(args, model=args.model, port=args.port, owned=False, fetch=False)
    # Ports that are free ones would be chosen at the start.
    ports = {**dict.fromkeys(spec.members, 0), "router": args.grpc_port, "http": args.port}
    explained = {
        member: _ask([*spec.command(member, ports), "--explain-config"], spec.environment(member))
        for member in spec.members
        if args.service in (None, service_of(member))
    }
    if args.json:
        print(json.dumps(explained, indent=1))
        return 0
    for member, options in explained.items():
        shown = [option for option in options if args.all or option["source"] != "default"]
        print(f"\n{paint(member, 'bold')}: {len(shown)} of {len(options)} options" + ("" if args.all else ", as given"))
        rows = [[o["name"], _text(o["value"]), o["source"], _text(o["default"]), o["help"]] for o in shown]
        if rows:
            print(table(["option", "value", "from", "default", "meaning"], rows))
    return 0


def _ask(command: list[str], environ: dict[str, str]) -> list[dict[str, Any]]:
    """Run a service's command with --explain-config, and return its options, each with name, value, source, default and
    help. If it fails, raises InvalidArgument with the error of the last line that it wrote. Raises
    subprocess.TimeoutExpired after 60 s."""
    from quire.errors import InvalidArgument

    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    if done.returncode:
        # The service's own words: one JSON line with the cause and the fix.
        last = (done.stderr.strip().splitlines() or ["{}"])[-1]
        try:
            cause = json.loads(last)
        except ValueError:
            cause = {"error": last}
        raise InvalidArgument(
            cause.get("code", "CONFIG"), cause.get("error", "The service refuses its options."), cause.get("fix", "")
        )
    options: list[dict[str, Any]] = json.loads(done.stdout)
    return options


def _text(value: Any) -> str:
    """Return a value as a table shows it: items with commas between them, `-` for an empty value."""
    if isinstance(value, list):
        return ",".join(map(str, value)) or "-"
    return "-" if value in ("", None) else str(value)
