"""Prompts that are submitted all at once over gRPC, each continued to its full length: tokens per second."""

from __future__ import annotations

import argparse
import random
import time

from quire.cli.benches.engine import add_engine_arguments, at_least_one, model_of, open_llm
from quire.cli.benches.results import add_file_argument, finish

HELP = "all prompts at once, tokens per second"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments, by vLLM's names: data set, number and lengths of prompts, seed, the result file, and the
    engine's options."""
    parser.add_argument("--dataset-name", "--dataset", choices=["random", "trace"], default="random", help="prompts")
    parser.add_argument("--dataset-path", metavar="FILE", help="of the trace")
    parser.add_argument("--num-prompts", type=int, default=64, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--input-len", type=int, default=128, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--output-len", type=int, default=64, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--random-range-ratio", type=float, default=0.0, metavar="R", help="lengths from 1-R to 1+R")
    parser.add_argument("--max-input-len", type=int, default=0, metavar="N", help="cut a trace's prompts")
    parser.add_argument("--max-output-len", type=int, default=0, metavar="N", help="cut a trace's answers")
    parser.add_argument("--prompt-seed", type=int, default=0, metavar="N", help="(default: %(default)s)")
    add_file_argument(parser)
    add_engine_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Submit all prompts, random or of a trace, in one call of LLM (which has at most 256 in flight), and print
    requests per second, and tokens per second with and without the prompts, as JSON. Answers have their full length.
    One short request is sent before, and not measured. Returns the exit code 0. Raises InvalidArgument for a count
    below 1 or a malformed trace, NotFound for one that cannot be read, and the errors of `open_llm`."""
    from quire.bench.datasets import RandomLengths, random_requests, trace_requests
    from quire.sampling_params import SamplingParams

    at_least_one(args, "num_prompts", "input_len", "output_len")
    with open_llm(args) as llm:
        model = model_of(llm, args)
        if args.dataset_name == "trace":
            requests = trace_requests(
                args.dataset_path or "",
                args.num_prompts,
                model.vocab_size,
                most_input=args.max_input_len,
                most_output=args.max_output_len,
            )
        else:
            lengths = RandomLengths(args.input_len, args.output_len, args.random_range_ratio)
            requests = random_requests(args.num_prompts, lengths, model.vocab_size, args.prompt_seed)
        prompts = [request.prompt for request in requests]
        params = [SamplingParams(temperature=0, max_tokens=r.output_len, ignore_eos=True) for r in requests]
        # The first request pays for what is lazy; its prompt is none of those that are measured.
        first = [random.Random(-1).randrange(model.vocab_size) for _ in range(8)]
        llm.generate(first, SamplingParams(temperature=0, max_tokens=2, ignore_eos=True), use_tqdm=False)
        began = time.perf_counter()
        outputs = llm.generate(prompts, params)
        elapsed_s = time.perf_counter() - began
    output_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    total = output_tokens + sum(map(len, prompts))
    return finish(
        args,
        {
            "model": model.name,
            "num_requests": len(prompts),
            "elapsed_time": round(elapsed_s, 4),
            "total_num_tokens": total,
            "output_tokens": output_tokens,
            "requests_per_second": round(len(prompts) / elapsed_s, 3),
            "tokens_per_second": round(total / elapsed_s, 2),
            "output_tokens_per_second": round(output_tokens / elapsed_s, 2),
        },
    )
