"""`quire chat`: a conversation in the terminal, streamed. /reset forgets it, /exit (or end of input) leaves."""

from __future__ import annotations

import argparse
import sys
import time
from typing import TYPE_CHECKING

from quire.cli.arguments.connection import add_connection_arguments, connect
from quire.cli.output.terminal import paint, print_error

if TYPE_CHECKING:
    from quire.client import Client
    from quire.sampling_params import SamplingParams

HELP = "talk to a model"
_COMMANDS = "/reset forgets what was said, /exit leaves; Ctrl-C ends an answer"
Message = dict[str, str]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments: the system prompt, --quick for a single question, the sampling parameters, and the flags that
    select the server."""
    parser.add_argument("--system", "--system-prompt", metavar="TEXT", help="what the model is told before all")
    parser.add_argument("-q", "--quick", metavar="TEXT", help="ask this alone, print the answer and leave")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="of an answer (default: the rest of the context)")
    parser.add_argument(
        "--temperature", type=float, default=0.7, metavar="T", help="0 is greedy (default: %(default)s)"
    )
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P", help="(default: %(default)s)")
    parser.add_argument("--seed", type=int, metavar="N", help="the same seed, the same answers")
    add_connection_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Answer each line of the input that is not blank, until the input ends or a line is /exit; /reset forgets the
    conversation but for the system message. If an answer fails, print the error and continue the conversation without
    that question. With --quick, answer that one prompt and end; an error of this answer is raised. Ctrl-C at the prompt
    passes on as KeyboardInterrupt. Returns exit code 0."""
    from quire.errors import QuireError
    from quire.sampling_params import SamplingParams

    params = SamplingParams(max_tokens=args.max_tokens, temperature=args.temperature, top_p=args.top_p, seed=args.seed)
    opening: list[Message] = [{"role": "system", "content": args.system}] if args.system else []
    with connect(args) as client:
        if args.quick:
            _answer(client, [*opening, {"role": "user", "content": args.quick}], params)
            return 0
        print(paint(_COMMANDS, "dim", sys.stderr), file=sys.stderr)
        messages = list(opening)
        while (said := _read()) is not None:
            if said == "/exit":
                break
            if said == "/reset":
                messages = list(opening)
                continue
            if not said.strip():
                continue
            messages.append({"role": "user", "content": said})
            try:
                messages.append({"role": "assistant", "content": _answer(client, messages, params)})
            except QuireError as error:
                messages.pop()
                print_error(error)
    return 0


def _read() -> str | None:
    """Read a line of input, with a prompt if that is a terminal; None at its end."""
    try:
        return input("> " if sys.stdin.isatty() else "")
    except EOFError:
        return None


def _answer(client: Client, messages: list[Message], params: SamplingParams) -> str:
    """Print the answer to the conversation as it comes, and return it. Its number of tokens, time to the first token
    and speed go to standard error. Ctrl-C ends the request early, and the text so far is the answer. A QuireError
    passes on; the text so far stays printed as a line, without those numbers."""
    from quire.errors import QuireError
    from quire.prompts import ChatPrompt

    parts, tokens, began = list[str](), 0, time.perf_counter()
    first_s = 0.0
    stream = client.generate(ChatPrompt(messages), params, return_token_ids=True)
    try:
        for delta in stream:
            tokens += len(delta.token_ids)
            first_s = first_s or time.perf_counter() - began
            if delta.text:
                parts.append(delta.text)
                print(delta.text, end="", flush=True)
    except KeyboardInterrupt:
        stream.close()  # type: ignore[attr-defined]  # a generator, as every iterator that is written with yield
    except QuireError:
        if parts:
            print()
        raise
    print()
    rest_s = time.perf_counter() - began - first_s
    rate = (tokens - 1) / rest_s if tokens > 1 and rest_s > 0 else 0.0
    facts = f"{tokens} tokens, the first after {first_s * 1000:.0f} ms, then {rate:.1f} tokens/s"
    print(paint(facts, "dim", sys.stderr), file=sys.stderr)
    return "".join(parts)
