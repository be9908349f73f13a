"""Stage 2: real models of the catalogue on the GPU, greedy, against the CPU's float32, which may differ at ties alone.

A model is skipped where its file is neither in the catalogue's cache nor to be fetched.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from bench.gpu.record import Recorder
from bench.harness.local_engine import LocalEngine
from quire.errors import Unavailable
from quire.model_catalog import CATALOG, pull
from quire_common.sequence import Sequence, Stop
from quire_tokenizer.model_files import read_model_files
from quire_tokenizer.vocabulary import Vocabulary
from quire_worker.config import WorkerConfig
from quire_worker.loading import LoadOptions, load_model
from quire_worker.model_source import load_configured
from tests.gpu.answers import worst_choice
from tests.gpu.engines import serve

MODELS = ("smollm2", "gemma3-270m")
_TIE = 0.02
"""As a part of the largest logit: what bf16's rounding over some 30 layers may decide."""
_PROMPTS = (
    "The capital of France is",
    "Name three primary colours:",
    "Once upon a time",
    "def fibonacci(n):",
    "The opposite of cold is",
    "Water boils at",
    "The largest ocean is the",
    "Bees make",
    "1, 2, 3, 4,",
    "To be, or not to be,",
    "A haiku about rain:",
    "The sun is a",
)
_TOKENS = 48


def run(recorder: Recorder, *, tiny: bool) -> None:
    """All models; `tiny`: the first one."""
    for name in MODELS[: 1 if tiny else None]:
        if not torch.cuda.is_available():
            recorder.skip(name, "there is no GPU")
            continue
        try:
            path = pull(CATALOG[name])
        except Unavailable as error:
            recorder.skip(name, error.message)
            continue
        with recorder.attempt(name):
            _compare(recorder, name, path)


def _compare(recorder: Recorder, name: str, path: Path) -> None:
    """Answer all prompts at once on the GPU, and ask the reference how good each token was."""
    vocabulary = Vocabulary(read_model_files(str(path)))
    stop = Stop(_TOKENS, ignore_eos=True)
    sequences = [Sequence(np.array(vocabulary.tokenizer.encode(text).ids, np.int32), stop) for text in _PROMPTS]
    config = WorkerConfig(model=str(path), device="cuda", kv_cache_memory_bytes=1 << 30, max_num_seqs=32)
    answers = serve(LocalEngine(load_configured(config, lambda *_: None), max_num_seqs=32), sequences)
    print(f"{name}: {_PROMPTS[0]}{vocabulary.tokenizer.decode(answers[0])!r}", flush=True)
    reference = load_model(path, LoadOptions(kv_cache_bytes=128 << 20, attention_backend="torch")).runner
    worst = [worst_choice(reference, *pair) for pair in zip(sequences, answers, strict=True)]
    recorder.check(
        f"{name} against the CPU",
        max(worst) <= _TIE,
        sequences=len(sequences),
        with_ties=sum(each > 0 for each in worst),
        worst=max(worst),
    )
