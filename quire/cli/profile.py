"""`quire profile`: shows where the time of a step goes on this machine, kernel by kernel, compared with what the
hardware allows.

The worker's profiler runs in its own process, because this package knows nothing of kernels.
"""

from __future__ import annotations

import argparse
import subprocess
import sys

from quire.models import find_model

HELP = "trace a step of a model, and time each kernel against its floor"
_FLAGS = (
    ("batch", "N", "sequences that decode in the step (default: 32)"),
    ("context", "N", "tokens of each (default: 1024)"),
    ("prompt", "N", "tokens of a fresh prompt beside them (default: none)"),
    ("temperature", "X", "of all sequences (default: 0, greedy)"),
    ("top-k", "N", "of all sequences"),
    ("top-p", "X", "of all sequences"),
    ("min-p", "X", "of all sequences"),
    ("frequency-penalty", "X", "of all sequences"),
    ("logprobs", "N", "alternatives that all sequences ask for (default: no logprobs)"),
    ("steps", "N", "steps that are traced (default: 10)"),
    ("out", "FOLDER", "where trace.json and kernels.json go (default: profile)"),
    ("device", "NAME", "auto, cpu or cuda"),
    ("load-format", "NAME", "auto, safetensors, gguf or dummy"),
    ("attention-backend", "NAME", "as of `quire serve`"),
    ("kv-cache-dtype", "NAME", "as of `quire serve`"),
    ("kv-cache-memory-bytes", "BYTES", "as of `quire serve`"),
    ("max-model-len", "N", "as of `quire serve`"),
    ("block-size", "N", "as of `quire serve`"),
    ("torch-threads", "N", "as of `quire serve`"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments: the step, and the worker's options that change its cost. The worker checks the values."""
    parser.add_argument("model", nargs="?", help="folder of the model (default: the demo model of the source)")
    for name, metavar, text in _FLAGS:
        parser.add_argument(f"--{name}", metavar=metavar, help=text)


def run(args: argparse.Namespace) -> int:
    """Run the worker's profiler in its own process, with the flags that were given, and return its exit code. The model
    is downloaded first if needed, with the errors of `find_model`."""
    command = [sys.executable, "-m", "quire_worker.profile", "--model", str(find_model(args.model))]
    for name, _, _ in _FLAGS:
        value = getattr(args, name.replace("-", "_"))
        if value is not None:
            command += [f"--{name}", value]
    return subprocess.run(command, check=False).returncode
