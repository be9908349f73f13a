"""`python -m bench.disaggregation.first_transfer`: measures the latency of the first request that another replica
prefills.

    python -m bench.disaggregation.first_transfer [--rounds 5] [--beside ../other/checkout]

Each round starts a prefill and a decode replica, on paced workers whose steps take no time. After a short pause, it
sends one request after the other. For the first request, the worker may have to start its KV transfer agent. The
benchmark prints the time of the first and the second token; the second token needs the pages. With `--beside`, another
checkout takes turns with this one. On a machine with other work, this is the only fair comparison of two versions.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from pathlib import Path

import grpc
import numpy as np

from bench import ROOT
from bench.harness.checkout_services import start_services
from bench.pipeline.first_token import MODEL
from quire.v1 import common_pb2, inference_pb2, inference_pb2_grpc

TOKENS = 4
_FLAGS: dict[str, dict[str, str | bool]] = {
    "worker": {"paced": "0", "served-model-name": "m"},
    "scheduler": {"enable-prefix-caching": False, "kvstore-offload": "off"},
    # Whoever is idle would compute its prompts itself.
    "router": {"pd-by-rates": False, "pd-threshold-tokens": "64"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=4, help="of each round")
    parser.add_argument("--prompt", type=int, default=512, help="tokens")
    parser.add_argument("--pause-s", type=float, default=2.0, help="from ready to the first request")
    parser.add_argument("--beside", type=Path, nargs="*", default=[], help="other checkouts, their stubs generated")
    options = parser.parse_args()
    checkouts = [ROOT, *(path.resolve() for path in options.beside)]
    took: dict[Path, list[list[tuple[float, float]]]] = {path: [] for path in checkouts}
    rng = np.random.default_rng(0)
    for number in range(options.rounds):
        for path in checkouts if number % 2 else checkouts[::-1]:
            spec = {"replicas": 0, "prefill": 1, "decode": 1, "flags": _FLAGS}
            with start_services(path, "first-transfer", MODEL, **spec) as services:
                time.sleep(options.pause_s)
                prompts = rng.integers(10, 250, (options.requests, options.prompt)).tolist()
                took[path].append([ask(services.grpc, prompt) for prompt in prompts])
    for path, rounds in took.items():
        print(f"{path.name}: ms to the first token, and to the second; median (least - most) of {len(rounds)} rounds")
        for at in range(options.requests):
            print(f"    request {at + 1}: {', '.join(span([one[at][which] for one in rounds]) for which in (0, 1))}")
    print(f"load average {os.getloadavg()[0]:.1f}")


def ask(address: str, prompt: list[int]) -> tuple[float, float]:
    """Return the milliseconds to the first two tokens."""
    request = inference_pb2.GenerateRequest(
        token_ids=inference_pb2.TokenIds(ids=np.array(prompt, "<i4").tobytes()),
        max_tokens=TOKENS,
        ignore_eos=True,
        return_token_ids=True,
        sampling=common_pb2.SamplingParams(temperature=0),
    )
    came_s: list[float] = []
    with grpc.insecure_channel(address) as channel:
        grpc.channel_ready_future(channel).result()
        began_s = time.monotonic()
        for response in inference_pb2_grpc.InferenceStub(channel).Generate(request):
            came_s += [time.monotonic() - began_s] * (len(response.token_ids) // 4)
    return came_s[0] * 1e3, came_s[1] * 1e3


def span(values: list[float]) -> str:
    return f"{statistics.median(values):.0f} ({min(values):.0f} - {max(values):.0f})"


if __name__ == "__main__":
    main()
