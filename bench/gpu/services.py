"""Stage 4: measures the five real services over HTTP with `quire bench`: streams at several concurrencies.

There is one load generator. The router has one process and then, for many streams, four. A separate row shows these
numbers, and the cores that each service and the load generator used. For a load with few requests there is another with
four times as many. It shows the effect of the beginning and the end, when not all streams are busy.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from bench import ROOT
from bench.gpu.figures import OVER_HTTP, VLLM_OVER_HTTP
from bench.gpu.http_load import LOAD_GENERATOR, HttpLoad, stack_of
from bench.gpu.model import write_config
from bench.gpu.record import Recorder
from bench.gpu.shapes import SHAPES
from bench.pipeline.services_arm import cpu_seconds
from quire.local.stack import LocalStack

_MOST_ROUTERS = 4
_FEW_REQUESTS, _LONGER = 1024, 4


def run(recorder: Recorder, *, tiny: bool) -> None:
    """Measure Qwen3-0.6B's shape with random weights on a GPU; without a GPU, the demo model with a few requests."""
    on_gpu = torch.cuda.is_available()
    flags: dict[str, str | bool]
    with tempfile.TemporaryDirectory() as folder:
        if on_gpu:
            model = write_config(Path(folder) / "m", SHAPES["0.6B"], 8192)
            flags, prompt, output = {"device": "cuda", "load-format": "dummy"}, 512, 128
        else:
            model, prompt, output = ROOT / "models" / "demo", 16, 4
            flags = {"device": "cpu", "attention-backend": "torch", "max-num-seqs": "4"}
        streams = tuple(OVER_HTTP) if on_gpu else (1, 2)
        least = 4 if tiny else 16
        loads = [
            HttpLoad(max(least, 4 * each), prompt, output, concurrency=each, warmups=each)
            for each in (streams[:1] if tiny and on_gpu else streams)
        ]
        many = [each for each in loads if each.concurrency > 1]
        for routers, put in ((1, loads), (_MOST_ROUTERS, many)):
            with recorder.attempt(f"HTTP, router processes {routers}"):
                if put:
                    _streams(recorder, model, flags, Path(folder), put, routers)


def _streams(
    recorder: Recorder, model: Path, flags: dict[str, str | bool], folder: Path, loads: list[HttpLoad], routers: int
) -> None:
    began = time.perf_counter()
    with contextlib.closing(LocalStack(stack_of(model, flags, routers))) as stack:
        recorder.figure("five services", serve_after_s=time.perf_counter() - began)
        for load in loads:
            name = f"HTTP, concurrency {load.concurrency}, router processes {routers}"
            before, start = cpu_seconds(stack), time.perf_counter()
            found: dict[str, float] = {}
            with recorder.attempt(name):
                found = load.put(stack.ready.http, folder)
            if not found:
                continue
            took, after = time.perf_counter() - start, cpu_seconds(stack)
            recorder.check(name, True, requests=load.requests)
            cpu_s = {name: after[name] - before[name] for name in after}
            cpu_s["load_generator"] = found["load_generator_cpu_s"]
            # Of the load generator's whole life, its start and the warm-up included.
            cores = {name: each / took for name, each in cpu_s.items()}
            report_streams(recorder, name, load.concurrency, found, cores, on_gpu=torch.cuda.is_available())
            if load.requests < _FEW_REQUESTS:
                _longer(recorder, name, load, found, stack.ready.http, folder)


def _longer(recorder: Recorder, name: str, load: HttpLoad, found: Mapping[str, float], url: str, folder: Path) -> None:
    """Measure the load with more requests, and report it together with the result of fewer requests."""
    more = replace(load, requests=_LONGER * load.requests, seed=load.seed + 1)
    title = f"{name}, {more.requests} requests"
    with recorder.attempt(title):
        longer = more.put(url, folder)
        percent = 100 * (longer["output_throughput"] / found["output_throughput"] - 1)
        recorder.figure(title, **_figures(longer), more_tok_s_percent=percent, fewer_requests=load.requests)


def _figures(found: Mapping[str, float]) -> dict[str, float]:
    return {
        "ttft_p50_ms": found["median_ttft_ms"],
        "tpot_p50_ms": found["median_tpot_ms"],
        "output_tok_s": found["output_throughput"],
    }


def report_streams(
    recorder: Recorder, name: str, concurrency: int, found: dict[str, float], cores: dict[str, float], *, on_gpu: bool
) -> None:
    """Report a row for each figure that counts, one for the other figures, and one for the CPU time of processes.
    Without a GPU there is no target."""
    figures = _figures(found)
    for target in OVER_HTTP[concurrency] if on_gpu else ():
        value = figures.pop(target.figure)
        recorder.figure(f"{name}, {target.figure}", **{target.figure: value}, **target.beside(value))
    recorder.figure(f"{name}, other figures", **figures, **(VLLM_OVER_HTTP.get(concurrency, {}) if on_gpu else {}))
    recorder.figure(
        f"{name}, processes",
        load_generator=f"{LOAD_GENERATOR}, 1 process",
        **{f"{process}_cores": round(each, 2) for process, each in cores.items()},
    )
