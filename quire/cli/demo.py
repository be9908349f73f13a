"""`quire demo`: starts five processes, answers questions, shows a picture of where the time went, and stops
everything."""

from __future__ import annotations

import argparse
import os
import time
from typing import TYPE_CHECKING

from quire.cli.output import terminal

if TYPE_CHECKING:
    from quire.client import Client
    from quire.prompts import ChatPrompt

HELP = "start, answer a prompt, show where the time went, stop"
PROMPT = """ROMEO:
But, soft! what light through yonder window breaks?
It is the east, and Juliet is the sun.
Arise, fair sun, and kill the envious moon,
"""
SECOND = "\nJULIET:\n"
QUESTIONS = ("What is the capital of France?", "And of Italy?")
_MAX_TOKENS = 96
_LIVELY, _SOBER = 0.8, 0.2
"""Temperatures: of verse, and of answers."""
_DRAIN_S = 5.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments: the model, the prompt and the length of the answer."""
    parser.add_argument(
        "--model", help="folder, GGUF file, name of the Hugging Face hub or of `quire models` (default: smollm2)"
    )
    parser.add_argument("--prompt", help="text to continue (default: a question in chat, or Shakespeare)")
    parser.add_argument("--max-tokens", type=int, default=_MAX_TOKENS, metavar="N", help="(default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Start a stack of five services, have it answer prompts while the answers and their timings are printed, then stop
    it. Without --prompt, a chat model of the catalogue gets two questions. Otherwise the model continues --prompt, or
    verse, and then a longer text. The model is downloaded if needed (see `find_model` and `default_model`). No process
    or port is left, also after an error; the stack's directory with its logs is left if the stack failed. Returns exit
    code 0."""
    from quire.cli.output.progress import ProgressLines
    from quire.client import Client
    from quire.local.spec import StackSpec
    from quire.local.stack import LocalStack
    from quire.models import default_model, find_model, is_conversational

    spec = StackSpec(
        name=f"demo-{os.getpid()}",
        model=str(find_model(args.model) if args.model else default_model()[1]),
        keep_directory=False,
        drain_timeout_s=_DRAIN_S,
    )
    print(f"Five services on this machine, serving {spec.model}\n", flush=True)
    stack = LocalStack(spec, ProgressLines(spec.members))
    try:
        print(f"\nUp after {stack.ready.seconds:.1f} s. A prompt goes in by gRPC:\n", flush=True)
        with Client(stack.grpc) as client:
            if args.prompt is None and is_conversational(spec.model):
                _converse(client, args.max_tokens)
            else:
                _continue(client, args.prompt or PROMPT, args.max_tokens)
    finally:
        began = time.perf_counter()
        stack.close()
    print(f"\nAll five stopped in {time.perf_counter() - began:.1f} s. `quire up` (or `make up`) keeps them running.")
    return 0


def _continue(client: Client, prompt: str, max_tokens: int) -> None:
    """Print the continuation of a text, of at most `max_tokens` tokens, then one of at most half as many for a prompt
    that begins with this text and its answer."""
    text = _ask(client, prompt, prompt, max_tokens, _LIVELY)
    print("\nA second prompt begins with the first one and its answer:\n", flush=True)
    _ask(client, prompt + text + SECOND, prompt + text + SECOND, max_tokens // 2, _LIVELY)


def _converse(client: Client, max_tokens: int) -> None:
    """Ask the two questions of QUESTIONS in one conversation, and print both answers, the first of at most `max_tokens`
    tokens and the second of at most half as many."""
    from quire.prompts import ChatPrompt

    messages: list[dict[str, str]] = []
    for number, question in enumerate(QUESTIONS):
        if number:
            print("\nThe conversation goes on; its beginning is known:\n", flush=True)
        messages.append({"role": "user", "content": question})
        text = _ask(client, ChatPrompt(list(messages)), f"> {question}\n", max_tokens // (number + 1), _SOBER)
        messages.append({"role": "assistant", "content": text})


def _ask(client: Client, prompt: str | ChatPrompt, shown: str, max_tokens: int, temperature: float) -> str:
    """Print `shown` and the streamed continuation of the prompt, then speed, cached tokens and the table of timings. If
    the kvstore loaded pages, a line says how many. Returns the continuation's text."""
    from quire.cli.output.timings import timing_table
    from quire.outputs import RequestOutput
    from quire.sampling_params import SamplingParams

    params = SamplingParams(temperature=temperature, seed=1, max_tokens=max_tokens)
    output, began, first_s = RequestOutput(prompt=shown), time.perf_counter(), 0.0
    print(terminal.paint(shown, "dim"), end="", flush=True)
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
