"""Runs Quire's scheduler core and worker engine in one process on a model: `-m bench.cpu.quire_arm MODEL THREADS
[int8]`."""

from __future__ import annotations

import os
import sys
from itertools import count

import numpy as np

from bench.cpu import measures
from quire_common.sequence import Sequence, Stop
from quire_worker.threads.waiting import limit_spinning


def main() -> None:
    limit_spinning(os.environ)  # before torch is imported, as the worker's command does
    from bench.harness.local_engine import LocalEngine, load

    model = load(
        sys.argv[1],
        kv_cache_bytes=1 << 30,
        threads=int(sys.argv[2]),
        quantize="int8" if "int8" in sys.argv[3:] else "none",
    )
    local = LocalEngine(model, max_num_seqs=measures.STREAMS)
    handles = count()

    def serve(seed: int, streams: int, output: int) -> None:
        asked = [next(handles) for _ in range(streams)]
        for handle, prompt in zip(asked, measures.prompts(seed, streams), strict=True):
            local.submit(handle, Sequence(np.array(prompt, np.int32), Stop(max_tokens=output, ignore_eos=True)))
        served = local.run()
        if any(len(served[handle].tokens) != output for handle in asked):
            raise RuntimeError("an answer is short")

    measures.report(measures.measure(serve))


if __name__ == "__main__":
    main()
