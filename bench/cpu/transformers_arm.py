"""Runs transformers on the same GGUF file: `-m bench.cpu.transformers_arm MODEL THREADS float32|bfloat16`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from bench.cpu import measures


def main() -> None:
    path = Path(sys.argv[1])
    torch.set_num_threads(int(sys.argv[2]))
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[sys.argv[3]]
    model: Any = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=dtype)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0

    def serve(seed: int, streams: int, output: int) -> None:
        ids = torch.tensor(measures.prompts(seed, streams))
        with torch.inference_mode():
            mask = torch.ones_like(ids)
            out = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=output)
        if out.shape[1] != measures.PROMPT + output:
            raise RuntimeError("an answer is short")

    measures.report(measures.measure(serve))


if __name__ == "__main__":
    main()
