"""`python -m bench.gpu.model_impls`: a model served by Quire's own code, and by the Transformers backend, on the GPU.

Both serve the same random weights' shape in one process, by turns, free-running. Prints the median time between two
tokens of each for every number of sequences, and their ratio.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from collections.abc import Sequence as Listed
from dataclasses import replace
from pathlib import Path
from statistics import median

from bench.gpu.engine import Local, worker_config
from bench.gpu.shapes import MODELS
from bench.worker.model_impls import IMPLS
from quire_common.sequence import Sampling
from quire_worker.config import WorkerConfig
from quire_worker.loading import ModelImpl
from quire_worker.model_source import load_configured

_PROMPT = 128
_TURNS = 3
_MEMORY_SHARE = {"quire": 0.4, "transformers": 0.8}
"""Share of the GPU's memory that is in use once the implementation has loaded: the first leaves room for the second."""


def main(argv: Listed[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=["0.6B"], choices=list(MODELS))
    parser.add_argument("--batches", nargs="*", type=int, default=[1, 32, 128], help="numbers of sequences")
    parser.add_argument("--output", type=int, default=128, help="tokens of each answer")
    args = parser.parse_args(argv)
    for name in args.models:
        for title, figures in measure(name, args.batches, args.output):
            print(f"{title}: {json.dumps(figures)}", flush=True)


def measure(name: str, batches: Listed[int], output: int) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield (model and number of sequences, figures) for each number of sequences."""
    with tempfile.TemporaryDirectory() as folder:
        config = worker_config(Path(folder), name, max(batches), 0, eager=False)
        _add_model_type(Path(config.model))
        served = {impl: _load(config, impl, max(batches)) for impl in IMPLS}
        for batch in batches:
            itl: dict[ModelImpl, list[float]] = {impl: [] for impl in IMPLS}
            for turn in range(1 + _TURNS):
                for impl, local in served.items():
                    figures = local.serve([_PROMPT] * batch, [output] * batch, Sampling())
                    if turn:  # the first is for warming up
                        itl[impl].append(figures["itl_ms"])
            medians = {f"{impl}_itl_ms": round(median(found), 3) for impl, found in itl.items()}
            ratio = median(itl["transformers"]) / median(itl["quire"])
            yield f"{name} {batch} sequences", {**medians, "transformers_over_quire": round(ratio, 2)}
        for local in served.values():
            local.device.close()


def _load(config: WorkerConfig, impl: ModelImpl, sequences: int) -> Local:
    share = _MEMORY_SHARE[impl] if config.device == "cuda" else config.gpu_memory_utilization
    served = load_configured(replace(config, model_impl=impl, gpu_memory_utilization=share), lambda *_: None)
    local = Local(served, sequences)
    while local.device.prepare():
        pass
    return local


def _add_model_type(folder: Path) -> None:
    """Write the type by which transformers finds its class into config.json."""
    path = folder / "config.json"
    fields = json.loads(path.read_text())
    fields["model_type"] = fields["architectures"][0].removesuffix("ForCausalLM").lower()
    path.write_text(json.dumps(fields))


if __name__ == "__main__":
    main()
