"""`quire run-batch`: answers a file of OpenAI's batch API, line by line. If it is run again, it continues where it
ended."""

from __future__ import annotations

import argparse
import sys

from quire.cli.arguments.connection import api_key
from quire.cli.arguments.stack_arguments import add_name

HELP = "answer a file of OpenAI batch requests"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments, by vLLM's names: input and output file, server or model, concurrency, and the API key. Quire's
    own are `--name`, `--retries` and `--restart`."""
    parser.add_argument("-i", "--input-file", required=True, metavar="FILE", help="JSON lines of requests")
    parser.add_argument("-o", "--output-file", required=True, metavar="FILE", help="JSON lines of answers")
    parser.add_argument("--base-url", metavar="URL", help="of the server (default: the stack that runs here)")
    parser.add_argument("--model", metavar="FOLDER", help="start a stack of its own on this model, and end it")
    parser.add_argument("--max-concurrency", type=int, default=64, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--retries", type=int, default=5, metavar="N", help="of what may be retried (default: 5)")
    parser.add_argument("--restart", action="store_true", help="answer all again, whatever is in the output file")
    parser.add_argument("--api-key", metavar="KEY", help="credential (default: the variable QUIRE_API_KEY)")
    add_name(parser)


def run(args: argparse.Namespace) -> int:
    """Send the requests that have no good answer in the output file, or all with --restart, to a server or, with
    --model, to a stack started for them. Failed answers of an earlier run, and answers to other requests, are removed
    from the file first; at the end, it has all answers in the order of the requests. Print the counts to standard
    error. Returns exit code 0 if every request has its answer, else 1. Raises InvalidArgument for bad numbers or lines
    or if both files are one, NotFound for an input file that cannot be read or a missing folder of the output,
    FailedPrecondition for an answer that cannot be written, and the errors of `_base_url`, or of finding the model and
    starting the stack."""
    from quire.batch.batch_file import BatchFile
    from quire.batch.runner import run_batch
    from quire.errors import InvalidArgument

    if args.max_concurrency < 1 or args.retries < 0:
        raise InvalidArgument("BAD_VALUE", "A count is too small.", "Give at least 1, and no fewer than 0 retries.")
    base_url = "" if args.model else _base_url(args)
    files = BatchFile(args.input_file, args.output_file, restart=args.restart)
    todo = files.todo()
    print(f"{len(files.requests)} requests, {len(files.requests) - len(todo)} of them answered", file=sys.stderr)
    if args.model:
        from quire.local.spec import StackSpec
        from quire.local.stack import LocalStack
        from quire.models import find_model

        stack = LocalStack(StackSpec(f"batch-{id(files)}", str(find_model(args.model)), keep_directory=False))
        try:
            failed = run_batch(files, todo, stack.ready.http, None, args.max_concurrency, args.retries)
        finally:
            stack.close()
    else:
        failed = run_batch(files, todo, base_url, api_key(args), args.max_concurrency, args.retries)
    files.finish()
    print(f"{len(todo) - failed} answered, {failed} failed", file=sys.stderr)
    return 1 if failed else 0


def _base_url(args: argparse.Namespace) -> str:
    """Return the server's URL without /v1: --base-url, or the URL of the running stack called --name. Raises
    InvalidArgument if --base-url is no URL, and FailedPrecondition if no such stack runs."""
    from quire.batch.base_url import parse_base_url
    from quire.errors import FailedPrecondition
    from quire.local.state import StateDirectory

    if args.base_url:
        parse_base_url(args.base_url)  # a text that is no URL is refused before the output file is touched
        return str(args.base_url).rstrip("/").removesuffix("/v1")
    state = StateDirectory(args.name).running()
    if state is None:
        raise FailedPrecondition(
            "NOT_RUNNING", f"No stack named {args.name!r} runs here.", "Start one with `quire up`, or give --base-url."
        )
    return state.http
