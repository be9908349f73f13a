"""How long one batch takes from its submission to its last token, over and over."""

from __future__ import annotations

import argparse
import random
import time

from quire.cli.benches.engine import add_engine_arguments, at_least_one, model_of, open_llm, random_prompt
from quire.cli.benches.results import add_file_argument, finish

HELP = "one batch over and over, seconds from submission to the last token"
_PERCENTS = (10, 25, 50, 75, 90, 99)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add lengths, batch size, answers per prompt, iterations, warm-up iterations and the result file, with vLLM's
    names and defaults. Also add `--prompt-seed`, which vLLM does not have, and the engine's options."""
    parser.add_argument("--input-len", type=int, default=32, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--output-len", type=int, default=128, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=8, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--n", type=int, default=1, metavar="N", help="answers per prompt (default: %(default)s)")
    parser.add_argument("--num-iters-warmup", type=int, default=10, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--num-iters", type=int, default=30, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--prompt-seed", type=int, default=0, metavar="N", help="(default: %(default)s)")
    add_file_argument(parser)
    add_engine_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Measure the time of one batch, `num_iters` times after the warm-up, and print its mean, percentiles and all
    times, in seconds, as one JSON object; --output-json writes it to a file too. Every iteration has other prompts, so
    that no cache helps. Answers have their full length, and are greedy unless --n is above 1. Returns the exit code 0.
    Raises InvalidArgument for a count below 1 (--num-iters-warmup is not checked), and the errors of `open_llm`."""
    from quire.bench.statistics import percentile
    from quire.sampling_params import SamplingParams

    at_least_one(args, "input_len", "output_len", "batch_size", "num_iters", "n")
    temperature = 1.0 if args.n > 1 else 0.0
    params = SamplingParams(n=args.n, temperature=temperature, max_tokens=args.output_len, ignore_eos=True)
    numbers, seconds = random.Random(args.prompt_seed), list[float]()
    with open_llm(args) as llm:
        model = model_of(llm, args)
        for iteration in range(args.num_iters_warmup + args.num_iters):
            prompts = [random_prompt(numbers, args.input_len, model.vocab_size) for _ in range(args.batch_size)]
            began = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            if iteration >= args.num_iters_warmup:
                seconds.append(time.perf_counter() - began)
    ordered = sorted(seconds)
    return finish(
        args,
        {
            "model": model.name,
            "batch_size": args.batch_size,
            "input_len": args.input_len,
            "output_len": args.output_len,
            "avg_latency": sum(seconds) / len(seconds),
            "latencies": seconds,
            "percentiles": {str(percent): percentile(ordered, percent) for percent in _PERCENTS},
        },
    )
