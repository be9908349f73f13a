"""Stage 5, second half: the kernel table, which compares each kernel of a step with its floor, at batch 1, 32 and 256.

Inputs are random numbers of the real shapes; keys, values and weights are cold. A kernel is timed in a captured chain
of its own calls, so the host's launches do not count. If the nodes of its graph (1.13 us each) take longer than its
floor, `nodes_us` shows their time. Floors are those of profile/cost.py, with 4.3 TB/s and 790 TFLOP/s. A trace of a
whole step by `quire profile` follows for each shape, in bench/results/profile.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from bench import ROOT
from bench.gpu.kernel_table.decoder_kernels import DecoderKernels
from bench.gpu.kernel_table.kernel_case import Bench, KernelCase
from bench.gpu.kernel_table.prompt_kernels import prompt_cases
from bench.gpu.kernel_table.sampling_kernels import sampling_cases
from bench.gpu.model import write_config
from bench.gpu.record import Recorder
from bench.gpu.shapes import SHAPES, TINY
from quire_worker.model.arch_spec import ArchSpec
from quire_worker.ops.interface import HeadShape
from quire_worker.ops.triton.gemm import GemmConfigs
from quire_worker.ops.triton.gemm_configs import gemm_configs_for
from quire_worker.ops.triton.triton_ops import TritonOps
from quire_worker.profile.floor import PEAKS, Peak

_BATCHES, _CONTEXT = (1, 32, 256), 1024
_LONG = (32, 8192)
_PROMPT_ROWS = 8192
_PROFILE_LIMIT_S = 200
_PROFILED = ("decode attention", "prefill attention", "sampling: thresholds", "sampling: draw", "logprobs")


def run(recorder: Recorder, *, tiny: bool) -> None:
    """Run both shapes on a GPU. Without a GPU, run a tiny shape under the interpreter, which shows that every row
    exists."""
    on_gpu = torch.cuda.is_available()
    peak = PEAKS.get(torch.cuda.get_device_name()) if on_gpu else None
    for name, spec in SHAPES.items() if on_gpu else (("tiny", TINY),):
        small = tiny or not on_gpu
        with torch.inference_mode(), recorder.attempt(f"{name}, rows of all kernels"):
            report(recorder, name, cases(bench_of(spec, on_gpu=on_gpu), small=small), peak)
        if on_gpu:
            torch.cuda.empty_cache()
        with recorder.attempt(f"profile of {name}"):
            _profile(recorder, name, spec, on_gpu)


def bench_of(spec: ArchSpec, *, on_gpu: bool) -> Bench:
    """Return the common parts for a worker's model. The interpreter only computes in float32."""
    device, dtype = torch.device("cuda" if on_gpu else "cpu"), torch.bfloat16 if on_gpu else torch.float32
    products = gemm_configs_for(torch.cuda.get_device_name(device)) if on_gpu else GemmConfigs({})
    ops = TritonOps(HeadShape.of(spec), device, products)
    ops.pdl = on_gpu and torch.cuda.get_device_capability(device)[0] >= 9
    return Bench(spec, ops, device, dtype, 64 if on_gpu else 16)


def cases(bench: Bench, *, small: bool) -> Iterator[tuple[str, KernelCase]]:
    """Yield (group, case), one at a time, so that the memory of a case is free when the next is made."""
    decoder = DecoderKernels(bench)
    for batch in (2,) if small else _BATCHES:
        bench.ops.kept_logits = torch.empty(batch, bench.spec.vocab_size, dtype=bench.dtype, device=bench.device)
        for case in decoder.cases(batch, 40 if small else _CONTEXT):
            yield f"batch {batch}", case
        for case in sampling_cases(bench, batch):
            yield f"batch {batch}", case
    for case in () if small else decoder.attention(*_LONG):
        yield f"batch {_LONG[0]}", case
    yield "prompts", decoder.gated_product(40 if small else _PROMPT_ROWS)
    for prompts, tokens, fresh in ((2, 40, True),) if small else ((1, 1024, False), (4, 2048, True)):
        for case in prompt_cases(bench, prompts, tokens, fresh=fresh):
            yield "prompts", case


def report(recorder: Recorder, name: str, found: Iterator[tuple[str, KernelCase]], peak: Peak | None) -> None:
    """Report a line for each case, and a check if a share of the floor is the target, or if the result has no valid
    numbers. A case that cannot be timed is a failed check."""
    for where, case in found:
        title = f"{name} {where}, {case.name}"
        with recorder.attempt(title):
            _report_case(recorder, title, case, peak)


def _report_case(recorder: Recorder, title: str, case: KernelCase, peak: Peak | None) -> None:
    figures = case.figures(peak)
    made = case.run(0)
    if made.is_floating_point() and not bool(torch.isfinite(made).all()):
        recorder.check(f"{title} gives numbers", False)
    recorder.figure(title, **figures)
    share = figures.get("of_floor")
    if case.wanted and share is not None:
        recorder.check(f"{title} reaches its floor", share >= case.wanted, of_floor=share, wanted=case.wanted)


def _profile(recorder: Recorder, name: str, spec: ArchSpec, on_gpu: bool) -> None:
    """Profile a whole step with a prompt and sequences that decode, sampled with limits and logprobs."""
    with tempfile.TemporaryDirectory() as folder:
        model = write_config(Path(folder) / name, spec, 4096 if on_gpu else 512)
        out = ROOT / "bench" / "results" / "profile" / name if on_gpu else Path(folder) / "profile"
        batch, context, prompt = (32, _CONTEXT, 2048) if on_gpu else (2, 40, 16)
        command = [sys.executable, "-m", "quire_worker.profile", "--model", str(model), "--load-format", "dummy"]
        command += ["--batch", str(batch), "--context", str(context), "--prompt", str(prompt), "--steps", "5"]
        command += ["--temperature", "0.8", "--top-k", "50", "--top-p", "0.95", "--logprobs", "5", "--out", str(out)]
        command += ["--device", "cuda" if on_gpu else "cpu", *([] if on_gpu else ["--attention-backend", "torch"])]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PROFILE_LIMIT_S, check=False)
        title = f"profile {name} {batch} x {context}, a prompt of {prompt}"
        recorder.check(title, done.returncode == 0, told=done.stderr[-300:] if done.returncode else "")
        if done.returncode:
            return
        rows = {row["name"]: row for row in json.loads((out / "kernels.json").read_text())["rows"]}
    total, least = (sum(row[key] for row in rows.values()) for key in ("us", "floor_us"))
    recorder.figure(f"{title}, the kernels of the whole step", us=total, floor_us=least, of_floor=least / total)
    if on_gpu:
        missing = [part for part in _PROFILED if part not in rows]
        recorder.check(f"{title}, parts apart", not missing, missing=", ".join(missing))
