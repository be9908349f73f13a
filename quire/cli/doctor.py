"""`quire doctor`: checks whether this machine has what Quire needs: ports, Redis, GPU and driver, disk, memory, clock.

Each check reports what it found and, if there is a problem, how to solve it. The command changes nothing.
"""

from __future__ import annotations

import argparse
import json

from quire.cli.output.terminal import paint

HELP = "check ports, Redis, GPU, driver, disk, memory and clock"
_MARKS = {"ok": ("✓", "green"), "warning": ("!", "yellow"), "failed": ("✗", "red")}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments: the port and host to listen on, a Redis and a model to check too, the device, and --json."""
    parser.add_argument("--port", type=int, default=8000, metavar="N", help="of HTTP (default: %(default)s)")
    parser.add_argument("--host", default="127.0.0.1", help="to listen on (default: %(default)s)")
    parser.add_argument("--redis", metavar="URL", help="a Redis that the services are to use; or host:port")
    parser.add_argument("--model", metavar="FOLDER", help="a model that is to be served")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto", help="cuda: a GPU is needed")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Run all checks, and print the findings with their fixes, or all as JSON. Returns the exit code: 1 if a finding
    failed, else 0; a warning is not a failure."""
    from quire.doctor.checks import check_all

    findings = check_all(args.host, args.port, args.redis, args.model, args.device)
    if args.json:
        print(json.dumps([finding.__dict__ for finding in findings], indent=1))
    else:
        for finding in findings:
            mark, style = _MARKS[finding.state]
            print(f"{paint(mark, style)} {finding.name:<10} {finding.found}")
            if finding.fix:
                print(f"  {'':<10} {paint(finding.fix, 'dim')}")
    return 1 if any(finding.state == "failed" for finding in findings) else 0
