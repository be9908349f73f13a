"""`quire up`: starts a stack in the background."""

from __future__ import annotations

import argparse

from quire.cli.arguments import stack_arguments

HELP = "start the services in the background"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments: the model, the port, --no-detach for the foreground, and the flags of a stack."""
    parser.add_argument(
        "--model", help="folder, GGUF file, name of the Hugging Face hub or of `quire models` (default: smollm2)"
    )
    parser.add_argument(
        "--port", type=int, metavar="N", help="port of HTTP (default: 8000, or a free one where that is taken)"
    )
    parser.add_argument(
        "--detach", action=argparse.BooleanOptionalAction, default=True, help="return when it is up (default)"
    )
    stack_arguments.add_stack_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Start the stack in the background, show its progress until it is ready, and print its addresses. The HTTP port is
    --port, or 8000 if that is free, or any free one. With --no-detach, serve in the foreground instead. Returns the
    exit code. Raises StartFailed if the stack does not get ready, and the errors of `stack_spec`."""
    from quire.cli.output.progress import ProgressLines
    from quire.cli.output.welcome import print_welcome
    from quire.cli.serve import serve
    from quire.local.ports import is_free
    from quire.local.stack import LocalStack
    from quire.local.state import DEFAULT_NAME

    port = args.port
    if port is None:
        port = stack_arguments.DEFAULT_PORT if is_free(args.host, stack_arguments.DEFAULT_PORT) else 0
    spec = stack_arguments.stack_spec(args, model=args.model, port=port, owned=not args.detach)
    if not args.detach:
        return serve(spec)
    print(f"Starting Quire with {spec.model}", flush=True)
    stack = LocalStack(spec, ProgressLines(spec.members))
    print_welcome(spec, stack.ready)
    name = "" if args.name == DEFAULT_NAME else f" --name {args.name}"
    print(f"`quire status{name}` shows its state, `quire logs{name}` reads its logs, `quire down{name}` ends it.")
    return 0
