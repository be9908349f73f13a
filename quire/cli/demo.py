"""`quire demo`: five processes start, one prompt is answered, a picture shows where the time went, everything stops."""

from __future__ import annotations

import argparse
import os
import time

from quire.cli.output import terminal

HELP = "start, answer a prompt, show where the time went, stop"
PROMPT = """ROMEO:
But, soft! what light through yonder window breaks?
It is the east, and Juliet is the sun.
Arise, fair sun, and kill the envious moon,
"""
SECOND = "\nJULIET:\n"
_MAX_TOKENS = 96
_DRAIN_S = 5.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What may be changed."""
    parser.add_argument(
        "--model", help="folder, GGUF file or name of `quire models` (default: the source's demo model)"
    )
    parser.add_argument("--prompt", default=PROMPT, help="text to continue (default: Shakespeare)")
    parser.add_argument("--max-tokens", type=int, default=_MAX_TOKENS, metavar="N", help="(default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Ends by itself; leaves no process, no port and no file."""
    from quire.cli.output.progress import ProgressLines
    from quire.client import Client
    from quire.local.spec import StackSpec
    from quire.local.stack import LocalStack
    from quire.models import find_model

    spec = StackSpec(
        name=f"demo-{os.getpid()}",
        model=str(find_model(args.model)),
        keep_directory=False,
        drain_timeout_s=_DRAIN_S,
    )
    print(f"Five services on this machine, serving {spec.model}\n", flush=True)
    stack = LocalStack(spec, ProgressLines(spec.members))
    try:
        print(f"\nUp after {stack.ready.seconds:.1f} s. A prompt goes in by gRPC:\n", flush=True)
        with Client(stack.grpc) as client:
            text = _ask(client, args.prompt, args.max_tokens)
            print("\nA second prompt begins with the first one and its answer:\n", flush=True)
            _ask(client, args.prompt + text + SECOND, args.max_tokens // 2)
    finally:
        began = time.perf_counter()
        stack.close()
    print(f"\nAll five stopped in {time.perf_counter() - began:.1f} s. `quire up` (or `make up`) keeps them running.")
    return 0


def _ask(client: object, prompt: str, max_tokens: int) -> str:
    """Stream the continuation, then draw its timings; returns its text."""
    from quire.cli.output.timings import timing_table
    from quire.client import Client
    from quire.outputs import RequestOutput
    from quire.sampling_params import SamplingParams

    if not isinstance(client, Client):
        raise TypeError("a Client is asked for")
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=max_tokens)
    output, began, first_s = RequestOutput(prompt=prompt), time.perf_counter(), 0.0
    print(terminal.paint(prompt, "dim"), end="", flush=True)
    for delta in client.generate(prompt, params, return_token_ids=True, return_timings=True):
        output.add(delta)
        if delta.text:
            first_s = first_s or time.perf_counter() - began
            print(terminal.paint(delta.text, "bold"), end="", flush=True)
    seconds = time.perf_counter() - began
    tokens, usage = len(output.outputs[0].token_ids), output.usage
    cached = f", {usage.cached_tokens} of {usage.prompt_tokens} prompt tokens from cache" if usage else ""
    print(f"\n\n{tokens} tokens in {seconds:.2f} s, the first after {first_s * 1000:.0f} ms{cached}. Where it went:\n")
    print(timing_table(output.timings, seconds), flush=True)
    loaded = sum(timing.count for timing in output.timings if (timing.service, timing.phase) == ("kvstore", "load"))
    if loaded:
        print(f"\nThe kvstore had {loaded} pages of this prompt: they were loaded, not computed.", flush=True)
    return output.outputs[0].text
