"""`quire` and `python -m quire`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

import quire
from quire.cli import registry
from quire.cli.output import terminal
from quire.errors import QuireError

EXIT_ERROR, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Parse `argv` (None: the process's arguments), run the command that it names, and return the command's own exit
    code. A QuireError, which is printed to standard error, makes it 1, and so does a BrokenPipeError, as of an output
    that nobody reads any more; nothing is printed then. Ctrl-C makes it 130. The parser ends the process itself: with
    exit code 2 for arguments that it refuses, with 0 after --help or --version. Unknown options are a QuireError. Other
    exceptions pass on."""
    parser = argparse.ArgumentParser(prog="quire", description="LLM serving as five cooperating services.")
    parser.add_argument("--version", action="version", version=f"quire {quire.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name in registry.NAMES:
        command = registry.load(name)
        added = commands.add_parser(name, help=command.HELP, description=command.HELP, allow_abbrev=False)
        command.add_arguments(added)
    args, rest = parser.parse_known_args(argv)
    try:
        terminal.refuse_rest(rest, vars(args))
        return registry.load(args.command).run(args)
    except QuireError as error:
        terminal.print_error(error)
        return EXIT_ERROR
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of our output left. Python would fail once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_ERROR


if __name__ == "__main__":
    sys.exit(main())
