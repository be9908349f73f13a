"""Runs a set of requests through the scheduler core and the worker engine, called directly in one process."""

from __future__ import annotations

import json
import time

import numpy as np

from bench.harness.local_engine import LocalEngine, load
from bench.harness.workload import Request, contender, uniform
from quire_common.sequence import Sequence, Stop


def main() -> None:
    arguments, requests = contender(__doc__)
    model = load(arguments.model, kv_cache_bytes=1 << 30, threads=arguments.threads)
    local = LocalEngine(model, max_num_seqs=arguments.batch, max_waiting=4096)
    first = uniform(4, (8, 16), (4, 8), (300, 4096), seed=10_000)
    for handle, request in enumerate(first, len(requests)):
        local.submit(handle, sequence(request))
    local.run()  # warm up
    began = time.perf_counter()
    for handle, request in enumerate(requests):
        local.submit(handle, sequence(request))
    served = local.run()
    elapsed = time.perf_counter() - began
    for handle, request in enumerate(requests):
        if len(served[handle].tokens) != request.output_len:
            raise RuntimeError(f"asked for {request.output_len} tokens, got {len(served[handle].tokens)}")
    tokens = sum(r.output_len for r in requests)
    print(json.dumps({"output_tokens": tokens, "seconds": elapsed, "output_tokens_per_s": tokens / elapsed}))


def sequence(request: Request) -> Sequence:
    return Sequence(np.array(request.prompt_ids, np.int32), Stop(max_tokens=request.output_len, ignore_eos=True))


if __name__ == "__main__":
    main()
