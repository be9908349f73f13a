"""`quire serve MODEL`: the five services in the foreground, with vLLM's flag names."""

from __future__ import annotations

import argparse
import signal
import types
from typing import TYPE_CHECKING

from quire.cli.arguments import stack_arguments
from quire.local.spec import StackSpec

if TYPE_CHECKING:
    from quire.local.stack import LocalStack

HELP = "serve a model in the foreground"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `quire serve` to the parser: those of `vllm serve`, and Quire's own."""
    parser.add_argument(
        "model",
        nargs="?",
        help="folder, GGUF file, name of the Hugging Face hub or of `quire models` (default: smollm2)",
    )
    parser.add_argument(
        "--port",
        type=int,
        default=stack_arguments.DEFAULT_PORT,
        metavar="N",
        help="port of HTTP; 0 picks a free one (default: %(default)s)",
    )
    stack_arguments.add_stack_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Start the stack that the flags describe, and serve in the foreground until SIGINT or SIGTERM. Returns the exit
    code of `serve`."""
    return serve(stack_arguments.stack_spec(args, model=args.model, port=args.port, owned=True))


def serve(spec: StackSpec) -> int:
    """Start the stack, print its addresses, and serve until SIGINT or SIGTERM. Then drain, stop and return exit code 0;
    a second signal ends the draining. A service that dies is started again. If the stack ends without these signals,
    print the cause, if one is known, and return 1. Raises StartFailed if the stack does not get ready, and
    KeyboardInterrupt for a signal before that. Replaces this process's handlers of both signals."""
    from quire.cli.output.progress import ProgressLines
    from quire.cli.output.terminal import print_error
    from quire.cli.output.welcome import print_welcome
    from quire.local.stack import LocalStack

    def interrupt(number: int, frame: types.FrameType | None) -> None:
        raise KeyboardInterrupt

    # SIGINT too: a shell's background job starts with it ignored, and would never end by it.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, interrupt)
    print(f"Starting Quire with {spec.model}", flush=True)
    stack = LocalStack(spec, ProgressLines(spec.members))
    try:
        print_welcome(spec, stack.ready)
        print("Ctrl-C ends it.", flush=True)
        while not stack.ended.wait():
            pass
        if stack.failure is not None:
            print_error(stack.failure)
        return 1  # nobody asked it to end
    except KeyboardInterrupt:
        print("\nStopping: running requests may finish. Once more to end at once.", flush=True)
        return _stop(stack)


def _stop(stack: LocalStack) -> int:
    """Ask the stack to drain and stop, and wait for its end; each Ctrl-C or SIGTERM meanwhile asks again, which ends
    the draining. Returns the exit code 0."""
    stack.terminate()
    while not stack.ended.is_set():
        try:
            stack.ended.wait()
        except KeyboardInterrupt:
            stack.terminate()
    stack.close()
    return 0
