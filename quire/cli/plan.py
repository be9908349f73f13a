"""`quire plan`: estimates how many replicas of a model a load needs on a GPU, and how much memory they use.

The estimate uses the model's config.json or GGUF file, and measurements of two models. The output says which figures
were not measured.
"""

from __future__ import annotations

import argparse
import dataclasses
import json

from quire.capacity.measured import GPUS, LARGE, SMALL
from quire.cli.output import terminal

HELP = "estimate replicas and memory for a model, a GPU and limits of latency"
_ABOUT = {
    "measured": "A model of these sizes was measured on this GPU. Loads in between are interpolated.",
    "interpolated": f"Interpolated between {SMALL.name} and {LARGE.name}: no model of this size was measured.",
    "extrapolated": f"Extrapolated beyond {SMALL.name} and {LARGE.name}: an order of magnitude. Measure it.",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the model, the GPU, the load and its latency limits."""
    parser.add_argument("model", help="folder or GGUF file of the model, or a name of the hub that is in the cache")
    parser.add_argument("--gpu", choices=tuple(GPUS), default="h200", help="GPU of a replica (default: h200)")
    parser.add_argument("--requests-per-s", type=float, required=True, metavar="N", help="of all replicas together")
    parser.add_argument("--prompt-tokens", type=int, default=1024, metavar="N", help="mean (default: 1024)")
    parser.add_argument("--output-tokens", type=int, default=256, metavar="N", help="mean (default: 256)")
    parser.add_argument(
        "--ttft-ms", type=float, default=0.0, metavar="MS", help="limit of the mean time to the first token"
    )
    parser.add_argument("--itl-ms", type=float, default=0.0, metavar="MS", help="limit of the mean time between tokens")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Compute the plan for the model, GPU and load, and print it as a table with the basis of each figure, or as JSON.
    Returns exit code 0. Only a named model of the catalogue is downloaded. Raises InvalidArgument for numbers out of
    range or a model without usable sizes, FailedPrecondition if there is no plan, and the errors of `find_model`."""
    from quire.capacity.model_sizes import read_sizes
    from quire.capacity.planner import Load, plan
    from quire.errors import InvalidArgument
    from quire.models import find_model

    least = {"requests_per_s": 1e-6, "prompt_tokens": 1, "output_tokens": 1, "ttft_ms": 0.0, "itl_ms": 0.0}
    for name, low in least.items():
        if not low <= getattr(args, name) < 1e9:
            flag = "--" + name.replace("_", "-")
            raise InvalidArgument(
                "BAD_VALUE", f"{flag} is {getattr(args, name)}.", f"Give at least {low:g}.", param=name
            )
    gpu, model = GPUS[args.gpu], read_sizes(find_model(args.model, fetch=False))
    load = Load(args.requests_per_s, args.prompt_tokens, args.output_tokens, args.ttft_ms, args.itl_ms)
    found = plan(gpu, model, load)
    if args.json:
        print(json.dumps({"model": model.name, "gpu": gpu.name, **dataclasses.asdict(found), "source": gpu.source}))
        return 0
    rows = [
        ("replicas", f"{found.replicas} for the load, {found.spare} more for one that is down", "estimated"),
        ("load of each", f"{found.requests_per_s:.2f} requests/s, {found.busy:.0%} of what it can", found.basis),
        ("sequences at a time", f"--max-num-seqs {found.batch}", found.basis),
        ("time to first token", f"{found.ttft_ms:.0f} ms on average", f"{found.basis}; waiting is estimated"),
        ("time between tokens", f"{found.itl_ms:.1f} ms on average", found.basis),
        ("weights", f"{found.weights_gib:.1f} GiB", "from the model's sizes"),
        (
            "KV cache",
            f"{found.kv_gib:.1f} GiB, {found.kv_tokens:,} tokens; the load uses {found.needed_kv_tokens:,}",
            "from the model's sizes; 4 GiB are set aside",
        ),
    ]
    print(f"{model.name}, {model.parameters / 1e9:.2f} billion parameters, on {gpu.name} ({gpu.memory_gib:g} GiB)\n")
    print(terminal.table(("", "PLAN", "BASIS"), rows))
    print(f"\n{_ABOUT[found.basis]} Source: {gpu.source}.")
    print(
        "Prefix caching, sampling parameters and structured prompts change the load. `quire bench serve` measures it."
    )
    return 0
