"""Stage 5, second half: each kernel's bandwidth or arithmetic against the floor, at batch 1, 32 and 256, and decode
attention over much KV. Random weights of the real shapes; a trace and records of each lie in bench/results/profile."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from bench.gpu_checks.record import Recorder
from bench.gpu_model import write_config
from bench.gpu_shapes import SHAPES
from quire_worker.model.arch_spec import ArchSpec

ROOT = Path(__file__).resolve().parents[2]
_BATCHES = ((1, 1024), (32, 1024), (256, 1024), (32, 8192))
_ATTENTION_WANTED, _LEAST_KV_BYTES = 0.85, 100 << 20
_LIMIT_S = 200
_TINY = ArchSpec("LlamaForCausalLM", 97, 48, 2, 4, 2, 16, 80, 512, 1e-5)


def run(recorder: Recorder, *, tiny: bool) -> None:
    """Both shapes on a GPU; without one, a tiny shape of the CPU's own kernels, which shows that the table works."""
    on_gpu = torch.cuda.is_available()
    shapes = SHAPES if on_gpu else {"tiny": _TINY}
    for name, spec in shapes.items():
        with tempfile.TemporaryDirectory() as folder:
            model = write_config(Path(folder) / name, spec, 16384 if on_gpu else 512)
            for batch, context in _BATCHES if on_gpu and not tiny else ((2, 40),):
                _profile(recorder, name, spec, model, batch, context, Path(folder), on_gpu)


def _profile(
    recorder: Recorder, name: str, spec: ArchSpec, model: Path, batch: int, context: int, folder: Path, on_gpu: bool
) -> None:
    out = ROOT / "bench" / "results" / "profile" / f"{name}-{batch}x{context}" if on_gpu else folder / "profile"
    command = [sys.executable, "-m", "quire_worker.profile", "--model", str(model), "--load-format", "dummy"]
    command += ["--batch", str(batch), "--context", str(context), "--steps", "5", "--out", str(out)]
    command += ["--device", "cuda" if on_gpu else "cpu", *([] if on_gpu else ["--attention-backend", "torch"])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    title = f"{name} {batch} x {context}"
    recorder.check(f"profile {title}", done.returncode == 0, told=done.stderr[-300:] if done.returncode else "")
    if done.returncode:
        return
    for row in json.loads((out / "kernels.json").read_text())["rows"]:
        kept = ("us", "gb_per_s", "tflop_per_s", "floor_us", "of_floor")
        recorder.figure(f"{title} {row['name']}", **{key: row[key] for key in kept})
        held = 2 * spec.layers * spec.kv_size * 2 * batch * context
        if on_gpu and row["name"] == "attention" and held // spec.layers >= _LEAST_KV_BYTES:
            recorder.check(f"{title} attention reaches its floor", row["of_floor"] >= _ATTENTION_WANTED)
