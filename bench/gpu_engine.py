"""Scheduler core, engine and GPU in one process: inter-token latency, throughput, prefill, against vLLM's figures.

`python -m bench.gpu_engine` on the GPU; random bf16 weights of the real shapes, greedy. What the services add is
measured elsewhere.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from bench.gpu_figures import ITL, ROWS
from bench.gpu_model import write_config
from bench.gpu_shapes import SHAPES
from quire_common.credit import WorkerHello
from quire_common.sequence import RequestContext, Sampling, Sequence, Stop
from quire_scheduler.config import SchedulerConfig
from quire_scheduler.scheduler import Scheduler
from quire_worker.config import WorkerConfig
from quire_worker.engine.engine import Engine
from quire_worker.model_source import load_configured
from quire_worker.replica import ServedModel

CONTEXT, KV_BYTES = 8192, 60 << 30


class Local:
    """One replica in this process, free-running."""

    def __init__(self, served: ServedModel, max_num_seqs: int) -> None:
        sizes = served.engine_spec(max_num_seqs)
        self.device = served.make_device(sizes, False)
        self.ended = threading.Event()
        self.device.wake = self.ended.set
        self.engine = Engine(sizes, self.device)
        self.hello = WorkerHello(
            self.engine.epoch,
            sizes.num_slots,
            max_num_seqs,
            (served.num_pages,),
            served.info,
            (served.device,),
            max_step_tokens=served.max_step_tokens,
        )
        self.config = SchedulerConfig(max_waiting=100_000)
        self.vocab = sizes.vocab_size

    def serve(self, prompts: list[int], outputs: list[int], sampling: Sampling) -> dict[str, float]:
        """Serve them all at once; figures of the whole."""
        core = Scheduler(self.config, replace(self.hello, epoch=self.engine.begin_run()))
        rng = np.random.default_rng(0)
        for handle, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
            ids = rng.integers(0, self.vocab, prompt).astype(np.int32)
            stop = Stop(output, 0, (), True)
            core.submit(1, handle, RequestContext(f"r{handle}"), Sequence(ids, stop, sampling), time.time())
        begin = time.perf_counter()
        first = 0.0
        steps: list[tuple[float, int, int]] = []
        tokens = 0
        host = 0.0
        while not core.idle:
            self.ended.clear()
            at = time.perf_counter()
            while (grant := core.next_grant(time.time())) is not None:
                self.engine.apply(grant)
            while self.engine.launch():
                pass
            busy = False
            while (report := self.engine.collect()) is not None:
                core.on_report(report, time.time())
                busy = True
                if len(report.token):
                    now = time.perf_counter() - begin
                    first = first or now
                    tokens += len(report.token)
                    steps.append((now, len(report.token), int(report.step_prefill_tokens.sum())))
            host += time.perf_counter() - at
            if not busy:
                self.ended.wait(1.0)
        took = time.perf_counter() - begin
        core.check_integrity()
        pure = [(b - a) for (a, _, _), (b, n, p) in itertools.pairwise(steps) if not p and n == len(prompts)]
        return {
            "seconds": took,
            "output_tok_s": tokens / took,
            "input_tok_s": sum(prompts) / took,
            "first_ms": first * 1000,
            "itl_ms": float(np.median(pure) * 1000) if pure else 0.0,
            "host_us_per_step": host / max(1, len(steps)) * 1e6,
            "steps": len(steps),
        }


def worker_config(folder: Path, name: str, max_num_seqs: int, tokens: int, *, eager: bool) -> WorkerConfig:
    """A worker's, of random weights of a real shape, which `folder` then describes. `tokens`: of a step; 0: as the
    worker chooses."""
    return WorkerConfig(
        model=str(write_config(folder / name, SHAPES[name], CONTEXT)),
        device="cuda",
        load_format="dummy",
        kv_cache_memory_bytes=KV_BYTES,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=tokens,
        enforce_eager=eager,
        peer_listen="off",
    )


def load(name: str, max_num_seqs: int, tokens: int, *, eager: bool) -> Local:
    """As a worker loads it."""
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        config = worker_config(Path(folder), name, max_num_seqs, tokens, eager=eager)
        local = Local(load_configured(config, lambda *_: None), max_num_seqs)
    print(f"{name}: ready in {time.perf_counter() - begin:.1f} s", flush=True)
    return local


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", nargs="*", default=list(SHAPES))
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--max-num-seqs", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=0, help="of a step; 0: as the worker chooses")
    parser.add_argument(
        "--rows", nargs="*", default=["itl", "sampling", "logprobs", "prefill", "single", "throughput", "uniform"]
    )
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    result: dict[str, object] = {}
    greedy = Sampling()
    for name in args.models:
        local = load(name, args.max_num_seqs, args.tokens, eager=args.eager)

        def show(row: str, figures: dict[str, float], note: str = "", name: str = name) -> None:
            result[f"{name} {row}"] = figures
            text = " ".join(f"{key} {value:.2f}" for key, value in figures.items())
            target = ROWS.get(f"{name} {row}")
            print(f"{name} {row}: {text} {target.spelled() if target else note}", flush=True)

        while local.device.prepare():
            pass
        local.serve([128] * 4, [16] * 4, greedy)
        local.serve([512] * 32, [16] * 32, greedy)
        if "itl" in args.rows:
            for batch in ITL[name]:
                if batch <= args.max_num_seqs:
                    show(f"itl {batch}", local.serve([128] * batch, [128] * batch, greedy))
        if "throughput" in args.rows:
            show("512 x 512/256", local.serve([512] * 512, [256] * 512, greedy))
        if "uniform" in args.rows and name == "0.6B":
            rng = np.random.default_rng(0)
            lengths = rng.integers(100, 1025, (2, 256))
            show("256 x 100..1024", local.serve(lengths[0].tolist(), lengths[1].tolist(), greedy))
        if "prefill" in args.rows:
            show("prefill 32 x 4096", local.serve([4096] * 32, [1] * 32, greedy))
        if "single" in args.rows:
            show("prompt 1024", min((local.serve([1024], [2], greedy) for _ in range(5)), key=lambda f: f["first_ms"]))
        if "sampling" in args.rows:
            drawn = Sampling(temperature=0.8, top_p=0.95, top_k=50, seed=1)
            show("sampling 256", local.serve([128] * 256, [128] * 256, drawn), "(against itl 256)")
        if "logprobs" in args.rows:
            show("logprobs 256", local.serve([128] * 256, [128] * 256, Sampling(logprobs=5)), "(against itl 256)")
        local.device.close()
        del local
        gc.collect()  # graphs know what captures them, and so their pages are in a cycle
        torch.cuda.empty_cache()
    if args.out:
        args.out.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
