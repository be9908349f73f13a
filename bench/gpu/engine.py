"""Measures scheduler core, engine and GPU in one process: inter-token latency, throughput and prefill, compared with
vLLM's figures.

`python -m bench.gpu.engine` runs on the GPU, with random bf16 weights of the real shapes, greedily. The number of pages
is the one that a worker would choose. `--models tiny --smaller 32` runs all rows on any machine. Other benchmarks
measure the cost of the services.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import itertools
import json
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Listed
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from bench.gpu.figures import ITL, ROWS
from bench.gpu.model import write_config
from bench.gpu.shapes import MODELS, SHAPES
from quire_common.credit import WorkerHello
from quire_common.sequence import RequestContext, Sampling, Sequence, Stop
from quire_common.structured.constraint import Constraint
from quire_scheduler.config import SchedulerConfig
from quire_scheduler.core.scheduler import Scheduler
from quire_worker.config import WorkerConfig
from quire_worker.engine.engine import Engine
from quire_worker.matcher.matcher_client import MatcherClient
from quire_worker.matcher.matcher_pool import MatcherPool
from quire_worker.model_source import load_configured
from quire_worker.replica import ServedModel

CONTEXT = 8192
Int32 = NDArray[np.int32]
KINDS = ("itl", "sampling", "logprobs", "prefill", "single", "lengths", "throughput", "uniform")
LENGTHS = (100, 300, 600, 1100, 1600, 2500, 3300)
"""Numbers of prompt tokens that are no size of a CUDA graph, so that the worker pads each prompt. There are no figures
of vLLM for these prompts."""
GREEDY = "greedy 256"
"""The row that others are compared with, served by turns with them: a GPU is faster before it is warm."""
_TURNS = 3


class Local:
    """One replica in this process, free-running."""

    def __init__(
        self, served: ServedModel, max_num_seqs: int, matcher: MatcherClient | MatcherPool | None = None
    ) -> None:
        sizes = served.engine_spec(max_num_seqs)
        if matcher is not None:
            sizes = replace(sizes, masks=matcher.ring)
        self.device = served.make_device(sizes, False)
        self.ended = threading.Event()
        self.device.wake = self.ended.set
        if matcher is not None:
            matcher.wake = self.ended.set
        self.engine = Engine(sizes, self.device, matcher=matcher)
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

    def serve(
        self, prompts: list[int], outputs: list[int], sampling: Sampling, constraint: Constraint | None = None
    ) -> dict[str, float]:
        """Serve all requests at once, each with the grammar if there is one. Returns the figures of the whole."""
        core = Scheduler(self.config, replace(self.hello, epoch=self.engine.begin_run()))
        rng = np.random.default_rng(0)
        for handle, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
            ids = rng.integers(0, self.vocab, prompt).astype(np.int32)
            stop = Stop(output, 0, (), True)
            core.submit(
                1,
                handle,
                RequestContext(f"r{handle}"),
                Sequence(ids, stop, sampling, constraint=constraint),
                time.time(),
            )
        begin = time.perf_counter()
        first = 0.0
        steps: list[tuple[float, int, int]] = []
        rows: list[tuple[float, Int32, Int32, Int32]] = []
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
                    rows.append((now, report.slot.copy(), report.count, report.finish.astype(np.int32)))
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
            "tpot_ms": median_tpot_ms(rows),
            "host_us_per_step": host / max(1, len(steps)) * 1e6,
            "steps": len(steps),
        }


def median_tpot_ms(rows: Iterable[tuple[float, Int32, Int32, Int32]]) -> float:
    """Return the median time per token after the first, as a client would see it, including steps with prompts of other
    requests; 0 if there is no second token. The input is the seconds, and the slots, tokens and finishes of each
    report. No request may have been preempted."""
    first: dict[int, float] = {}
    tokens: dict[int, int] = {}
    found = []
    for now, *columns in rows:
        for slot, count, finish in zip(*(column.tolist() for column in columns), strict=True):
            if count:
                first.setdefault(slot, now)
            tokens[slot] = tokens.get(slot, 0) + count
            if finish:
                begin, after_first = first.pop(slot, now), tokens.pop(slot) - 1
                found += [(now - begin) / after_first] if after_first > 0 else []
    return float(np.median(found) * 1000) if found else 0.0


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the table: requests that are served together, with numbers of prompt and output tokens."""

    name: str
    prompts: list[int]
    outputs: list[int]
    sampling: Sampling = dataclasses.field(default_factory=Sampling)
    tries: int = 1
    """The one with the earliest first token counts."""
    by_turns: bool = False
    """Served by turns with its neighbours of which this is so; the median time between tokens counts."""

    def smaller(self, by: int) -> Row:
        """Return a similar row, with so many times fewer and shorter requests."""
        kept = slice(max(1, len(self.prompts) // by))
        prompts, outputs = ([max(1, each // by) for each in sizes[kept]] for sizes in (self.prompts, self.outputs))
        return replace(self, prompts=prompts, outputs=outputs)


_WARM = (Row("few", [128] * 4, [16] * 4), Row("more", [512] * 32, [16] * 32))


def rows_of(model: str, kinds: Listed[str], most: int) -> Iterator[Row]:
    """Return the rows in the order of the table. `most`: the number of sequences at a time, for rows about a single
    step."""
    batches = ITL.get(model, ITL["0.6B"])
    if "itl" in kinds:
        yield from (Row(f"itl {batch}", [128] * batch, [128] * batch) for batch in batches if batch <= most)
    if "throughput" in kinds:
        yield Row("512 x 512/256", [512] * 512, [256] * 512)
    if "uniform" in kinds and model != "8B":
        lengths = np.random.default_rng(0).integers(100, 1025, (2, 256))
        yield Row("256 x 100..1024", lengths[0].tolist(), lengths[1].tolist())
    if "prefill" in kinds:
        yield Row("prefill 32 x 4096", [4096] * 32, [1] * 32)
    if "single" in kinds:
        yield Row("prompt 1024", [1024], [2], tries=5)
    if "lengths" in kinds:
        yield from (Row(f"prompt {length}", [length], [2], tries=9) for length in LENGTHS)
    drawn = Sampling(temperature=0.8, top_p=0.95, top_k=50, seed=1)
    asked = {"sampling": drawn, "logprobs": Sampling(logprobs=5)}
    over = {f"{kind} 256": sampling for kind, sampling in asked.items() if kind in kinds}
    if over:
        over = {GREEDY: Sampling(), **over}
    yield from (Row(title, [128] * 256, [128] * 256, sampling, by_turns=True) for title, sampling in over.items())


def worker_config(folder: Path, name: str, max_num_seqs: int, tokens: int, *, eager: bool) -> WorkerConfig:
    """Return a worker's configuration with random weights of a model's shape, and write the config to `folder`.
    `tokens` is the limit of tokens in a step; 0: the worker chooses it, as it chooses the number of pages."""
    return WorkerConfig(
        model=str(write_config(folder / name, MODELS[name], CONTEXT)),
        device="cuda" if name in SHAPES else "cpu",
        attention_backend="auto" if name in SHAPES else "torch",  # which needs no compiler
        load_format="dummy",
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=tokens,
        enforce_eager=eager,
        peer_listen="off",
    )


def load(name: str, max_num_seqs: int, tokens: int, *, eager: bool) -> Local:
    """Load the model as a worker does, with all its graphs."""
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        config = worker_config(Path(folder), name, max_num_seqs, tokens, eager=eager)
        served = load_configured(config, lambda *_: None)
        local = Local(served, max_num_seqs)
    print(f"{name}: ready in {time.perf_counter() - begin:.1f} s, {served.num_pages} pages", flush=True)
    while local.device.prepare():
        pass
    return local


def measure(local: Local, name: str, rows: Iterable[Row]) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield (model and row, figures), each as soon as it is known. For a row with several turns, yield the figures so
    far after each turn."""
    for _, some in itertools.groupby(rows, lambda row: row.by_turns or row.name):
        together: list[tuple[Row, list[dict[str, float]]]] = [(row, []) for row in some]
        for row, found in together * (_TURNS if together[0][0].by_turns else 1):
            found.append(_best(local, row))
            figures, title = sorted(found, key=lambda each: each["itl_ms"])[len(found) // 2], f"{name} {row.name}"
            text = " ".join(f"{key} {value:.2f}" for key, value in figures.items())
            target = ROWS.get(title)
            beside = target.spelled() if target else f"(against {GREEDY})" if row.sampling != Sampling() else ""
            print(f"{title}: {text} {beside}", flush=True)
            yield title, figures


def _best(local: Local, row: Row) -> dict[str, float]:
    tries = [local.serve(row.prompts, row.outputs, row.sampling) for _ in range(row.tries)]
    return min(tries, key=lambda each: each["first_ms"])


def main(argv: Listed[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=list(SHAPES), choices=list(MODELS))
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--max-num-seqs", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=0, help="of a step; 0: as the worker chooses")
    parser.add_argument("--rows", nargs="*", default=KINDS, choices=KINDS)
    parser.add_argument("--smaller", type=int, default=1, help="so many times fewer and shorter requests")
    parser.add_argument("--out", type=Path, help="file for the figures, written anew with each row")
    args = parser.parse_args(argv)
    result: dict[str, dict[str, float]] = {}
    for name in args.models:
        local = load(name, args.max_num_seqs, args.tokens, eager=args.eager)
        warm, rows = (
            [row.smaller(args.smaller) for row in of] for of in (_WARM, rows_of(name, args.rows, args.max_num_seqs))
        )
        for row in warm:
            local.serve(row.prompts, row.outputs, row.sampling)
        for title, figures in measure(local, name, rows):
            result[title] = figures
            if args.out:
                args.out.write_text(json.dumps(result))
        local.device.close()
        del local
        gc.collect()  # graphs know what captures them, and so their pages are in a cycle
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
