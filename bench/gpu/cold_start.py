"""Stage 4: measures cold starts of the five services, from the start of their processes to the first token.

Qwen3-0.6B's shape has random weights that the worker makes: first with an empty kernel cache, then with the cache of
that start. Llama's 8B shape is read from safetensors files, which are written before. Its files are first read with the
operating system's page cache full and the kernel cache empty, then with both full, and then from the disk alone.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence as Listed
from pathlib import Path

import torch

from bench import ROOT
from bench.gpu.figures import COLD_START
from bench.gpu.model import write_config, write_shards
from bench.gpu.record import Recorder
from bench.gpu.shapes import SHAPES, TINY

_LIMIT_S = 300
_CONTEXT = 8192
_SHARD_BYTES = 4 << 30
_EMPTY, _WARM = "empty kernel cache", "warm kernel cache"
_FROM_DISK = "warm kernel cache, empty page cache"


def run(recorder: Recorder, *, tiny: bool) -> None:
    """Measure on a GPU; `tiny`: only random weights. Without a GPU, start the demo model and a tiny shape once each."""
    with tempfile.TemporaryDirectory() as name:
        folder, flags = Path(name), ["--device", "cpu", "--attention-backend", "torch", "--max-num-seqs", "4"]
        if not torch.cuda.is_available():
            _start(recorder, "cold start", ROOT / "models" / "demo", folder, flags, [_EMPTY])
            _start(recorder, "cold start, shards", _write(folder / "shards", 1 << 16), folder, flags, [_EMPTY])
            return
        flags = ["--device", "cuda"]
        random = write_config(folder / "random", SHAPES["0.6B"], _CONTEXT)
        _start(recorder, "cold start", random, folder, [*flags, "--load-format", "dummy"], [_EMPTY, _WARM])
        if not tiny:
            shards = _write(folder / "shards", _SHARD_BYTES)
            _start(recorder, "cold start, 8B shards", shards, folder, flags, [_EMPTY, _WARM])
            _drop_cached(shards)
            _start(recorder, "cold start, 8B shards", shards, folder, flags, [_FROM_DISK])


def _write(folder: Path, shard_bytes: int) -> Path:
    """Write 8B's shape, or a tiny one without a GPU, as a model folder with its weights."""
    spec = SHAPES["8B"] if torch.cuda.is_available() else TINY
    write_config(folder, spec, min(_CONTEXT, spec.max_positions))
    write_shards(folder, shard_bytes, "cuda" if torch.cuda.is_available() else "cpu")
    return folder


def _drop_cached(folder: Path) -> None:
    """Take the folder's files out of the operating system's page cache."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _start(recorder: Recorder, title: str, model: Path, folder: Path, flags: Listed[str], caches: Listed[str]) -> None:
    """Start the services once for each name in `caches`, one after the other, with one kernel cache for each model."""
    out = folder / "startup.json"
    command = [sys.executable, "-m", "quire", "bench", "startup", "--model", str(model)]
    command += ["--num-iters", str(len(caches)), "--output-json", str(out), *flags]
    environment = {**os.environ, "TRITON_CACHE_DIR": str(folder / f"kernels-{model.name}")}
    starts = f"{title}, {caches[-1]}: the services start"
    with recorder.attempt(starts):
        done = subprocess.run(command, env=environment, timeout=_LIMIT_S, stdout=sys.stderr, check=False)
        recorder.check(starts, done.returncode == 0)
        if done.returncode == 0:
            found = json.loads(out.read_text())
            for cache, ready, first in zip(caches, found["ready_s"], found["first_token_s"], strict=True):
                # Without a GPU there is nothing that the figures could stand beside.
                beside = COLD_START[f"{title}, {cache}"].beside(first) if torch.cuda.is_available() else {}
                recorder.figure(f"{title}, {cache}", ready_s=ready, first_token_s=first, **beside)
