"""The five services with a GPU, configured like vLLM in its measurement, and the load of one `quire bench serve`."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from quire.local.spec import StackSpec

LOAD_GENERATOR = "quire bench serve"
_LIMIT_S = 120


def stack_of(model: Path, worker: dict[str, str | bool], routers: int = 1) -> StackSpec:
    """Return the spec of a stack without prefix caching, whose router has this many processes and refuses no
    request."""
    flags: dict[str, dict[str, str | bool]] = {
        "worker": worker,
        "scheduler": {"kvstore-min-tokens": "1000000", "enable-prefix-caching": False},
        "router": {"max-concurrent-requests": "4096", "http-workers": str(routers)},
    }
    return StackSpec("gpu-check", str(model), flags=flags)


@dataclass(frozen=True, slots=True)
class HttpLoad:
    """Requests with random prompts of token ids, streamed and greedy, from one process."""

    requests: int
    input_len: int
    output_len: int
    spread: float = 0.0
    """Lengths differ by this share, up and down."""
    concurrency: int = 0
    """Most that are open at once; 0: all."""
    warmups: int = 0
    seed: int = 0
    counted: bool = False
    """Events tell how many tokens they carry, for `decode_tpot`."""

    def put(self, url: str, folder: Path) -> dict[str, float]:
        """Run the load, and return its report with `load_generator_cpu_s`, the CPU time of the load generator with its
        start. Raises RuntimeError if a request failed, and CalledProcessError if all did."""
        out = folder / "load.json"
        command = [sys.executable, "-m", "quire", "bench", "serve", "--base-url", url, "--ignore-eos"]
        command += ["--num-prompts", str(self.requests), "--num-warmups", str(self.warmups), "--seed", str(self.seed)]
        command += ["--random-input-len", str(self.input_len), "--random-output-len", str(self.output_len)]
        command += ["--random-range-ratio", str(self.spread)]
        command += ["--max-concurrency", str(self.concurrency)] if self.concurrency else []
        command += ["--extra-body", '{"return_token_ids": true}'] if self.counted else []
        command += ["--save-result", "--result-dir", str(folder), "--result-filename", out.name]
        before = _children_s()
        subprocess.run(command, timeout=_LIMIT_S, stdout=sys.stderr, check=True)
        result: dict[str, float] = json.loads(out.read_text())
        if result["failed"]:
            raise RuntimeError(f"{result['failed']} of {self.requests} requests failed")
        result["input_throughput"] = result["total_input_tokens"] / result["duration"]
        result["load_generator_cpu_s"] = _children_s() - before
        return result


def _children_s() -> float:
    """Return user and system time of child processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
