"""Stage 4: the five real services over HTTP, by `quire bench`: cold starts, then streams at several concurrencies."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from bench.gpu_checks.record import Figure, Recorder
from bench.gpu_serve import write_config
from bench.gpu_shapes import SHAPES
from bench.services_arm import cpu_seconds
from quire.local.spec import StackSpec
from quire.local.stack import LocalStack

ROOT = Path(__file__).resolve().parents[2]
_LIMIT_S = 300
# Concurrency -> vLLM's TTFT and TPOT (ms) and output tokens per second, over HTTP.
_THEIRS: dict[int, tuple[float, float, float]] = {
    1: (13.2, 1.61, 0.0),
    64: (160, 3.3, 13_632),
    256: (427, 11.6, 16_969),
}


def run(recorder: Recorder, *, tiny: bool) -> None:
    """Qwen3-0.6B's shape with random weights on a GPU; without one, the demo model and a few requests."""
    on_gpu = torch.cuda.is_available()
    with tempfile.TemporaryDirectory() as folder:
        if on_gpu:
            model = write_config(Path(folder) / "m", SHAPES["0.6B"], 8192)
            flags, prompt, output = {"device": "cuda", "load-format": "dummy"}, 512, 128
        else:
            model, flags, prompt, output = ROOT / "models" / "demo", {"device": "cpu", "max-num-seqs": "4"}, 16, 4
        _cold_starts(recorder, model, flags, Path(folder), starts=2 if on_gpu else 1)
        concurrencies = (1,) if tiny or not on_gpu else (1, 64, 256)
        _streams(recorder, model, flags, Path(folder), concurrencies, prompt, output)


def _cold_starts(recorder: Recorder, model: Path, flags: dict[str, str], folder: Path, starts: int) -> None:
    """The first with an empty kernel cache, the second with what that one left."""
    out = folder / "startup.json"
    command = [*_bench("startup"), "--model", str(model), "--num-iters", str(starts), "--output-json", str(out)]
    command += [part for name, value in flags.items() for part in (f"--{name}", value)]
    environment = {**os.environ, "TRITON_CACHE_DIR": str(folder / "kernels")}
    done = subprocess.run(command, env=environment, timeout=_LIMIT_S, stdout=sys.stderr, check=False)
    recorder.check("cold start", done.returncode == 0)
    if done.returncode == 0:
        found = json.loads(out.read_text())
        for name, ready, first in zip(
            ("empty kernel cache", "warm kernel cache"), found["ready_s"], found["first_token_s"], strict=False
        ):
            wanted = 40 if name.startswith("empty") else 12
            recorder.figure(f"cold start, {name}", ready_s=ready, first_token_s=first, wanted_s=wanted, vllm_ready_s=86)


def _streams(
    recorder: Recorder,
    model: Path,
    flags: dict[str, str],
    folder: Path,
    concurrencies: tuple[int, ...],
    prompt: int,
    output: int,
) -> None:
    services: dict[str, dict[str, str | bool]] = {
        "worker": dict(flags),
        # As vLLM's figures were taken.
        "scheduler": {"kvstore-min-tokens": "1000000", "enable-prefix-caching": False},
        "router": {"max-concurrent-requests": "4096"},
    }
    began = time.perf_counter()
    with contextlib.closing(LocalStack(StackSpec("gpu-check", str(model), flags=services))) as stack:
        recorder.figure("five services", serve_after_s=time.perf_counter() - began)
        for streams in concurrencies:
            count = max(4 if concurrencies == (1,) else 16, 4 * streams)
            command = [*_bench("serve"), "--base-url", stack.ready.http, "--ignore-eos", "--save-result"]
            command += ["--num-prompts", str(count), "--max-concurrency", str(streams), "--num-warmups", str(streams)]
            command += ["--random-input-len", str(prompt), "--random-output-len", str(output)]
            command += ["--result-dir", str(folder), "--result-filename", f"{streams}.json"]
            before, start = cpu_seconds(stack), time.perf_counter()
            done = subprocess.run(command, timeout=_LIMIT_S, stdout=sys.stderr, check=False)
            took, after = time.perf_counter() - start, cpu_seconds(stack)
            recorder.check(f"streams at concurrency {streams}", done.returncode == 0)
            if done.returncode == 0:
                cores = {f"{name}_cores": round((after[name] - before[name]) / took, 2) for name in after}
                _report(recorder, streams, json.loads((folder / f"{streams}.json").read_text()), cores)


def _report(recorder: Recorder, streams: int, found: dict[str, float], cores: dict[str, float]) -> None:
    figures: dict[str, Figure] = {
        "ttft_p50_ms": found["median_ttft_ms"],
        "tpot_p50_ms": found["median_tpot_ms"],
        "output_tok_s": found["output_throughput"],
        **cores,
    }
    if streams in _THEIRS and torch.cuda.is_available():
        ttft, tpot, rate = _THEIRS[streams]
        figures |= {"vllm_ttft_ms": ttft, "vllm_tpot_ms": tpot, "vllm_tok_s": rate or None}
    recorder.figure(f"concurrency {streams}", **figures)


def _bench(kind: str) -> list[str]:
    return [sys.executable, "-m", "quire", "bench", kind]
