"""Stage 2: engines that must come to the same tokens, greedy.

The GPU's against the CPU's in float32, graphs against kernels one by one, free-running against lockstep. In bf16 two
tokens may be equally good: a difference counts only where the reference, asked for the logits after what both have in
common, finds one of them better by more than bf16 can tell.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch

from bench.gpu_checks.check_model import CheckModel, next_logits
from bench.gpu_checks.record import Recorder
from bench.local_engine import LocalEngine, Served, load
from quire_common.sequence import Sequence, Stop
from quire_worker.config import WorkerConfig
from quire_worker.model_source import load_configured
from quire_worker.replica import ServedModel
from quire_worker.runner import ModelRunner

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "models" / "demo"
_TIE = 0.15
"""Of logits; bf16 holds numbers of about 10 to within 0.03, and errors add up over layers."""
_LINES = ("ROMEO:", "JULIET:", "First Citizen:\nBefore we", "The king", "O, what a", "My lord, I", "What say you")


def run(recorder: Recorder, *, tiny: bool) -> None:
    """The demo model on a GPU; a made-up one under the interpreter, where a step takes a second."""
    on_gpu = torch.cuda.is_available()
    with tempfile.TemporaryDirectory() as folder:
        if on_gpu:
            reference = load(DEMO).runner
            prompts = _demo_prompts(4 if tiny else 24)
            output = 16 if tiny else 96
            engines = _gpu_engines()
        else:
            model = CheckModel(Path(folder), 64)
            reference = model.runner
            rng = np.random.default_rng(4)
            prompts = [rng.integers(3, 97, size).tolist() for size in (5, 20)]
            output = 3
            engines = {
                "interpreted, free-running": lambda: LocalEngine(model.served(64, eager=True), max_num_seqs=4),
                "interpreted, lockstep": lambda: LocalEngine(
                    model.served(64, eager=True), max_num_seqs=4, lockstep=True
                ),
            }
            recorder.skip("eager equals graph", "there is no GPU, and the interpreter has no graphs")
        plain = [_by_hand(reference, prompt, output) for prompt in prompts]
        found = {name: _serve(make(), prompts, output) for name, make in engines.items()}
        (first, *others) = found
        _compare(recorder, f"{first} against the CPU", found[first], plain, prompts, reference)
        for other in others:
            _compare(recorder, f"{first} against {other}", found[first], found[other], prompts, reference)
        name = "alone equals batched (--batch-invariant)"
        if on_gpu:
            even = _served_on_gpu(batch_invariant=True)
            together = _serve(LocalEngine(even, max_num_seqs=32), prompts, output)
            alone = [_serve(LocalEngine(even, max_num_seqs=32), [prompt], output)[0] for prompt in prompts]
            recorder.check(name, together == alone, sequences=len(prompts))
        else:
            recorder.skip(name, "there is no GPU: float32 under the interpreter proves nothing of bf16")


def _served_on_gpu(*, eager: bool = False, batch_invariant: bool = False) -> ServedModel:
    config = WorkerConfig(
        model=str(DEMO),
        device="cuda",
        kv_cache_memory_bytes=1 << 30,
        max_num_seqs=32,
        enforce_eager=eager,
        batch_invariant=batch_invariant,
    )
    return load_configured(config, lambda *_: None)


def _gpu_engines() -> Mapping[str, Callable[[], LocalEngine]]:
    return {
        "gpu, graphs, free-running": lambda: LocalEngine(_served_on_gpu(), max_num_seqs=32),
        "gpu, eager, free-running": lambda: LocalEngine(_served_on_gpu(eager=True), max_num_seqs=32),
        "gpu, graphs, lockstep": lambda: LocalEngine(_served_on_gpu(), max_num_seqs=32, lockstep=True),
    }


def _demo_prompts(count: int) -> list[list[int]]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    texts = [" ".join(_LINES[(index + more) % len(_LINES)] for more in range(1 + index % 5)) for index in range(count)]
    return [tokenizer.encode(text).ids for text in texts]


def _serve(local: LocalEngine, prompts: list[list[int]], output: int) -> list[list[int]]:
    for handle, prompt in enumerate(prompts):
        local.submit(handle, Sequence(np.array(prompt, np.int32), Stop(output, ignore_eos=True)))
    served: dict[int, Served] = local.run()
    local.check_quiet()
    local.close()
    errors = [each.error for each in served.values() if each.error]
    if errors:
        raise RuntimeError(f"requests failed: {errors}")
    return [served[handle].tokens for handle in range(len(prompts))]


def _by_hand(runner: ModelRunner, prompt: list[int], output: int) -> list[int]:
    """What the reference draws, computed from nothing for each token: no engine, no cache."""
    tokens = list(prompt)
    for _ in range(output):
        tokens.append(int(next_logits(runner, tokens).argmax()))
    return tokens[len(prompt) :]


def _compare(
    recorder: Recorder,
    name: str,
    one: list[list[int]],
    other: list[list[int]],
    prompts: list[list[int]],
    reference: ModelRunner,
) -> None:
    ties, worst = 0, 0.0
    lengths = [len(a) == len(b) for a, b in zip(one, other, strict=True)]
    for prompt, a, b in zip(prompts, one, other, strict=True):
        at = next((index for index, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
        if at is not None:
            logits = next_logits(reference, prompt + a[:at])
            ties += 1
            worst = max(worst, float(logits.max() - min(logits[a[at]], logits[b[at]])))
    recorder.check(
        f"greedy tokens: {name}", all(lengths) and worst <= _TIE, sequences=len(one), parted_at_ties=ties, worst=worst
    )
