"""Runs llama.cpp on the same file, in its own environment: `-m bench.cpu.llama_cpp_arm MODEL THREADS`.

All streams decode in one batch, each with its own sequence id, as in llama.cpp's server. Sampling is greedy: the
largest logit.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import llama_cpp  # type: ignore[import-not-found]  # in an environment of its own
import numpy as np

from bench.cpu import measures


def main() -> None:
    threads = int(sys.argv[2])
    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(sys.argv[1].encode(), llama_cpp.llama_model_default_params())
    options = llama_cpp.llama_context_default_params()
    options.n_ctx = measures.STREAMS * (measures.PROMPT + measures.OUTPUT + 64)
    options.n_batch = options.n_ubatch = measures.PROMPT
    options.n_seq_max = measures.STREAMS
    options.n_threads = options.n_threads_batch = threads
    context = llama_cpp.llama_init_from_model(model, options)
    vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    batch = llama_cpp.llama_batch_init(measures.PROMPT, 0, 1)

    def decode(rows: list[tuple[int, int, int, bool]]) -> list[int]:
        """Decode a batch of (token, position, stream, wanted), and return the next token of each wanted row."""
        batch.n_tokens = len(rows)
        for row, (token, position, stream, wanted) in enumerate(rows):
            batch.token[row], batch.pos[row] = token, position
            batch.n_seq_id[row], batch.seq_id[row][0], batch.logits[row] = 1, stream, wanted
        if llama_cpp.llama_decode(context, batch):
            raise RuntimeError("llama_decode failed")
        asked = [row for row, each in enumerate(rows) if each[3]]
        return [_best(llama_cpp.llama_get_logits_ith(context, row), vocabulary) for row in asked]

    def serve(seed: int, streams: int, output: int) -> None:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
        tokens = []
        for stream, prompt in enumerate(measures.prompts(seed, streams)):
            last = len(prompt) - 1
            tokens += decode([(token, place, stream, place == last) for place, token in enumerate(prompt)])
        for step in range(output - 1):
            at = measures.PROMPT + step
            tokens = decode([(token, at, stream, True) for stream, token in enumerate(tokens)])

    measures.report(measures.measure(serve))


def _best(logits: Any, vocabulary: int) -> int:
    address = ctypes.cast(logits, ctypes.POINTER(ctypes.c_float))
    return int(np.ctypeslib.as_array(address, (vocabulary,)).argmax())


if __name__ == "__main__":
    main()
