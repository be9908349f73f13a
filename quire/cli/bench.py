"""`quire bench throughput`: how many tokens per second a stack gives when it has all the work at once."""

from __future__ import annotations

import argparse
import json
import random
import time

from quire.cli.connection import api_key
from quire.cli.stack_arguments import add_engine_options
from quire.engine_options import ENGINE_OPTIONS

HELP = "measure"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One kind so far."""
    kinds = parser.add_subparsers(dest="kind", metavar="KIND", required=True)
    throughput = kinds.add_parser(
        "throughput", help="all prompts at once, tokens per second", description=throughput_help(), allow_abbrev=False
    )
    throughput.add_argument("--model", help="folder of the model (default: the demo model of the source)")
    throughput.add_argument("--address", metavar="HOST:PORT", help="gRPC address; default: a stack of its own")
    throughput.add_argument("--api-key", metavar="KEY", help="credential (default: the variable QUIRE_API_KEY)")
    throughput.add_argument("--dataset", "--dataset-name", choices=["random"], default="random", help="the prompts")
    throughput.add_argument("--num-prompts", type=int, default=64, metavar="N", help="(default: %(default)s)")
    throughput.add_argument("--input-len", type=int, default=128, metavar="N", help="(default: %(default)s)")
    throughput.add_argument("--output-len", type=int, default=64, metavar="N", help="(default: %(default)s)")
    throughput.add_argument("--prompt-seed", type=int, default=0, metavar="N", help="(default: %(default)s)")
    engine = throughput.add_argument_group("engine", "options of a stack of its own")
    add_engine_options(engine)


def throughput_help() -> str:
    """What is measured, for `--help`."""
    return (
        "Random prompts of one length, all submitted at once over gRPC, each continued to its full length. Prints JSON."
    )


def run(args: argparse.Namespace) -> int:
    """Print one JSON object."""
    from quire.client import Client
    from quire.errors import InvalidArgument
    from quire.llm import LLM
    from quire.sampling_params import SamplingParams

    for name in ("num_prompts", "input_len", "output_len"):
        if getattr(args, name) < 1:
            raise InvalidArgument("BAD_VALUE", f"--{name.replace('_', '-')} is less than 1.", "Give at least 1.")
    options = {option.name: getattr(args, option.name.replace("-", "_")) for option in ENGINE_OPTIONS}
    options = {name: value for name, value in options.items() if value is not None}
    params = SamplingParams(temperature=0, max_tokens=args.output_len, ignore_eos=True)
    with LLM(args.model, address=args.address, api_key=api_key(args), **options) as llm:
        with Client(llm.address, api_key=api_key(args)) as client:
            model = client.models()[0]
        numbers = random.Random(args.prompt_seed)
        prompts = [
            [numbers.randrange(model.vocab_size) for _ in range(args.input_len)] for _ in range(args.num_prompts)
        ]
        llm.generate(prompts[0], params, use_tqdm=False)  # the first request pays for what is lazy
        began = time.perf_counter()
        outputs = llm.generate(prompts, params)
        elapsed_s = time.perf_counter() - began
    output_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    total = output_tokens + args.num_prompts * args.input_len
    report = {
        "model": model.name,
        "num_requests": args.num_prompts,
        "input_len": args.input_len,
        "output_len": args.output_len,
        "elapsed_time": round(elapsed_s, 4),
        "total_num_tokens": total,
        "output_tokens": output_tokens,
        "requests_per_second": round(args.num_prompts / elapsed_s, 3),
        "tokens_per_second": round(total / elapsed_s, 2),
        "output_tokens_per_second": round(output_tokens / elapsed_s, 2),
    }
    print(json.dumps(report, indent=1))
    return 0
