"""Runs transformers' batched `generate` on a set of requests, the baseline of bench.pipeline, in a separate process."""

from __future__ import annotations

import json
import time

import torch
from transformers import AutoModelForCausalLM

from bench.harness.workload import Request, contender


def run(model_path: str, requests: list[Request], batch: int, threads: int) -> dict[str, float]:
    """Serve all requests greedily in batches of similar length (by output, then prompt). Counts only useful tokens."""
    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    ordered = sorted(requests, key=lambda r: (r.output_len, len(r.prompt_ids)))
    with torch.inference_mode():
        _generate(model, ordered[:2], 4)  # warm up
        started = time.perf_counter()
        for first in range(0, len(ordered), batch):
            group = ordered[first : first + batch]
            _generate(model, group, max(r.output_len for r in group))
        elapsed = time.perf_counter() - started
    tokens = sum(r.output_len for r in requests)
    return {"output_tokens": tokens, "seconds": elapsed, "output_tokens_per_s": tokens / elapsed}


def _generate(model: torch.nn.Module, group: list[Request], new_tokens: int) -> None:
    width = max(len(r.prompt_ids) for r in group)
    ids = torch.zeros(len(group), width, dtype=torch.long)
    mask = torch.zeros(len(group), width, dtype=torch.long)
    for row, request in enumerate(group):
        ids[row, width - len(request.prompt_ids) :] = torch.tensor(request.prompt_ids)
        mask[row, width - len(request.prompt_ids) :] = 1
    out = model.generate(input_ids=ids, attention_mask=mask, do_sample=False, max_new_tokens=new_tokens)  # type: ignore[operator]  # transformers adds it
    if out.shape[1] != width + new_tokens:
        raise RuntimeError("generate stopped early: the comparison would flatter")


def main() -> None:
    arguments, requests = contender(__doc__)
    print(json.dumps(run(arguments.model, requests, arguments.batch, arguments.threads)))


if __name__ == "__main__":
    main()
