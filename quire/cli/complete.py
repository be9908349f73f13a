"""`quire complete PROMPT`: one continuation."""

from __future__ import annotations

import argparse
import sys
import time

from quire.cli.arguments.connection import add_connection_arguments, connect

HELP = "continue a prompt"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments: the prompt, the sampling parameters, --stream, --timings, and the flags that select the
    server."""
    parser.add_argument("prompt", help="text; - reads it from standard input")
    parser.add_argument("--max-tokens", type=int, default=64, metavar="N", help="(default: %(default)s)")
    parser.add_argument(
        "--temperature", type=float, default=1.0, metavar="T", help="0 is greedy (default: %(default)s)"
    )
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P", help="(default: %(default)s)")
    parser.add_argument("--top-k", type=int, default=0, metavar="K", help="0: all (default: %(default)s)")
    parser.add_argument("--seed", type=int, metavar="N", help="the same seed, the same answer")
    parser.add_argument("--stop", action="append", metavar="TEXT", help="end before this text; may be repeated")
    parser.add_argument("--stream", action="store_true", help="print as it comes")
    parser.add_argument("--timings", action="store_true", help="show where the time went")
    add_connection_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Print the continuation of the prompt (- reads it from standard input) to standard output, with --stream as it
    comes. With --timings, a table of the time of each phase goes to standard error. Returns exit code 0. Errors of the
    connection and of the request pass on."""
    from quire.cli.output.timings import timing_table
    from quire.outputs import RequestOutput
    from quire.sampling_params import SamplingParams

    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    params = SamplingParams(
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        seed=args.seed,
        stop=args.stop,
    )
    output, began = RequestOutput(prompt=prompt), time.perf_counter()
    with connect(args) as client:
        for delta in client.generate(prompt, params, return_timings=args.timings):
            output.add(delta)
            if args.stream and delta.text:
                print(delta.text, end="", flush=True)
    seconds = time.perf_counter() - began
    print("" if args.stream else output.outputs[0].text)
    if args.timings:
        print(f"\n{timing_table(output.timings, seconds)}\n\n{seconds * 1000:.1f} ms in all", file=sys.stderr)
    return 0
