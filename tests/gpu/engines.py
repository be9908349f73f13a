"""Stage 2: engines that must come to the same tokens, greedy.

The GPU's against the CPU's in float32, graphs against kernels one by one, free-running against lockstep, Quire's own
model code against the Transformers backend; and the same
of requests whose thinking has a budget, of requests whose logits Python changes, and of requests with grammars, whose
masks mostly come late. In bf16 two tokens may be equally
good: a difference counts only where the reference, asked for the logits after what both have in common, finds one of
them better by more than bf16 can tell.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from bench import ROOT
from bench.gpu.record import Recorder
from bench.harness.local_engine import LocalEngine, Served, load
from quire_common.sequence import Sampling, Sequence, Stop
from quire_common.structured.capability import STRUCTURED_OUTPUT
from quire_common.structured.constraint import Constraint
from quire_common.thinking import ThinkingBudget
from quire_worker.arrays import Float32, Int32
from quire_worker.config import WorkerConfig
from quire_worker.loading import ModelImpl
from quire_worker.matcher.guidance_backend import GuidanceBackend
from quire_worker.model_source import load_configured
from quire_worker.replica import ServedModel
from quire_worker.runner import ModelRunner
from quire_worker.sampling.logits_processor import LogitsProcessors
from quire_worker.sampling.logits_state import LogitsState
from tests.fakes.worker.local_matcher import LocalMatcher, letter_backend, masks_after
from tests.gpu.answers import all_logits
from tests.gpu.check_model import CheckModel

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
            prompts = [rng.integers(3, 97, size).astype(np.int32) for size in (5, 20)]
            output = 3
            served = replace(model.served(64, eager=True), logits_processors=_PROCESSORS)
            engines = {
                "interpreted, free-running": lambda grammars: _local(served, 4, grammars),
                "interpreted, lockstep": lambda grammars: _local(served, 4, grammars, lockstep=True),
            }
            recorder.skip("eager equals graph", "there is no GPU, and the interpreter has no graphs")
        stop = Stop(output, ignore_eos=True)
        # Under the interpreter, one sequence on one engine must do for the rare kinds.
        few = prompts if on_gpu else prompts[:1]
        kinds: dict[str, list[Sequence]] = {
            "greedy tokens": [Sequence(prompt, stop) for prompt in prompts],
            "budgets of thinking": [
                Sequence(prompt, stop, thinking=ThinkingBudget((int(prompt[-1]),), (7, 9), (1 + place) % output))
                for place, prompt in enumerate(few)
            ],
            "logits changed by Python": [
                Sequence(prompt, stop, Sampling(processors=() if place % 2 else ("alternate",)))
                for place, prompt in enumerate(few)
            ],
            "grammars": [Sequence(prompt, stop, constraint=Constraint.of(_GRAMMAR)) for prompt in few],
        }
        for kind, sequences in kinds.items():
            some = engines if on_gpu or kind == "greedy tokens" else dict([*engines.items()][:1])
            with recorder.attempt(kind):
                _compare_all(recorder, kind, sequences, reference, some)
        name = "alone equals batched (--batch-invariant)"
        if on_gpu:
            with recorder.attempt(name):
                _alone_and_batched(recorder, name, kinds["greedy tokens"])
        else:
            recorder.skip(name, "there is no GPU: float32 under the interpreter proves nothing of bf16")


def _compare_all(
    recorder: Recorder,
    kind: str,
    sequences: list[Sequence],
    reference: ModelRunner,
    engines: Mapping[str, _MakeEngine],
) -> None:
    plain = [_by_hand(reference, sequence) for sequence in sequences]
    has_grammars = any(sequence.constraint is not None for sequence in sequences)
    grammars = _grammars(reference.decoder.spec.vocab_size) if has_grammars else None
    found = {name: serve(make(grammars), sequences) for name, make in engines.items()}
    (first, *others) = found
    compare = _Comparison(recorder, kind, sequences, reference)
    compare(f"{first} against the CPU", found[first], plain)
    for other in others:
        compare(f"{first} against {other}", found[first], found[other])


def _alone_and_batched(recorder: Recorder, name: str, sequences: list[Sequence]) -> None:
    even = _served_on_gpu(batch_invariant=True)
    together = serve(LocalEngine(even, max_num_seqs=32), sequences)
    # Nothing is kept for the next one.
    alone = serve(LocalEngine(even, max_num_seqs=32, enable_prefix_caching=False), sequences, one_by_one=True)
    recorder.check(name, together == alone, sequences=len(sequences))


def _served_on_gpu(
    *, eager: bool = False, batch_invariant: bool = False, model_impl: ModelImpl = "auto"
) -> ServedModel:
    config = WorkerConfig(
        model=str(DEMO),
        device="cuda",
        kv_cache_memory_bytes=1 << 30,
        max_num_seqs=32,
        enforce_eager=eager,
        batch_invariant=batch_invariant,
        model_impl=model_impl,
    )
    return replace(load_configured(config, lambda *_: None), logits_processors=_PROCESSORS)


_MakeEngine = Callable[[GuidanceBackend | None], LocalEngine]
"""An engine that applies such grammars, or none."""


def _gpu_engines() -> Mapping[str, _MakeEngine]:
    return {
        "gpu, graphs, free-running": lambda grammars: _local(_served_on_gpu(), 32, grammars),
        "gpu, eager, free-running": lambda grammars: _local(_served_on_gpu(eager=True), 32, grammars),
        "gpu, graphs, lockstep": lambda grammars: _local(_served_on_gpu(), 32, grammars, lockstep=True),
        "gpu, Transformers backend, graphs": lambda grammars: _local(
            _served_on_gpu(model_impl="transformers"), 32, grammars
        ),
        "gpu, Transformers backend, eager": lambda grammars: _local(
            _served_on_gpu(model_impl="transformers", eager=True), 32, grammars
        ),
    }


def _local(served: ServedModel, rows: int, grammars: GuidanceBackend | None, *, lockstep: bool = False) -> LocalEngine:
    """An engine, with a matcher in this process if it applies grammars."""
    if grammars is None:
        return LocalEngine(served, max_num_seqs=rows, lockstep=lockstep)
    info = replace(served.info, capabilities=(*served.info.capabilities, STRUCTURED_OUTPUT))
    matcher = LocalMatcher(grammars, info.vocab_size, mask_slots=rows)
    return LocalEngine(replace(served, info=info), max_num_seqs=rows, lockstep=lockstep, matcher=matcher.client)


def _grammars(vocab_size: int) -> GuidanceBackend:
    return letter_backend(vocab_size, _EOS)


def _demo_prompts(count: int) -> list[Int32]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    texts = [" ".join(_LINES[(index + more) % len(_LINES)] for more in range(1 + index % 5)) for index in range(count)]
    return [np.array(tokenizer.encode(text).ids, np.int32) for text in texts]


def serve(local: LocalEngine, sequences: list[Sequence], *, one_by_one: bool = False) -> list[list[int]]:
    """Serve the sequences together, or one after the other, and close the engine. Returns their tokens; raises
    RuntimeError if one failed."""
    for handle, sequence in enumerate(sequences):
        local.submit(handle, sequence)
        if one_by_one:
            local.run()
    served: dict[int, Served] = local.run()
    local.check_quiet()
    local.close()
    errors = [each.error for each in served.values() if each.error]
    if errors:
        raise RuntimeError(f"requests failed: {errors}")
    return [served[handle].tokens for handle in range(len(sequences))]


def _by_hand(runner: ModelRunner, sequence: Sequence) -> list[int]:
    """What the reference draws, computed from nothing for each token: no engine, no cache."""
    output: list[int] = []
    while len(output) < sequence.stop.max_tokens:
        output.append(int(_logits(runner, sequence, output).argmax()))
    return output


def _logits(runner: ModelRunner, sequence: Sequence, output: list[int]) -> Float32:
    """[V] after so much of the output, as the sequence asks for them."""
    logits: Float32 = all_logits(runner, [*sequence.prompt_ids.tolist(), *output])[-1].copy()
    controls = LogitsState.of(replace(sequence, output_ids=np.array(output, np.int32)), _PROCESSORS)
    if controls is not None:
        controls.apply(logits)
    if sequence.constraint is not None:
        masks_after(_grammars(len(logits)), sequence.constraint.text)(output).restrict(logits)
    return logits


def _alternate(prompt_ids: Int32, output_ids: Int32, logits: Float32) -> Float32:
    """Even tokens and odd ones by turns, the first by what the prompt is, and none of the last eight."""
    logits[(int(prompt_ids.sum()) + len(output_ids)) % 2 :: 2] = -np.inf
    logits[output_ids[-8:]] = -np.inf
    return logits


_EOS = (2,)
_GRAMMAR = "start: /([A-N]{1,3}[0-7]){200}/"
"""Token t stands for the character of the code 48 + t. It does not end before the sequences do."""
_PROCESSORS: LogitsProcessors = {"alternate": _alternate}


@dataclass(frozen=True)
class _Comparison:
    """Of two engines' answers to the same sequences."""

    recorder: Recorder
    kind: str
    sequences: list[Sequence]
    reference: ModelRunner

    def __call__(self, name: str, one: list[list[int]], other: list[list[int]]) -> None:
        ties, worst = 0, 0.0
        lengths = [len(a) == len(b) for a, b in zip(one, other, strict=True)]
        for sequence, a, b in zip(self.sequences, one, other, strict=True):
            at = next((index for index, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
            if at is not None:
                logits = _logits(self.reference, sequence, a[:at])
                ties += 1
                worst = max(worst, float(logits.max() - min(logits[a[at]], logits[b[at]])))
        self.recorder.check(
            f"{self.kind}: {name}", all(lengths) and worst <= _TIE, sequences=len(one), parted_at_ties=ties, worst=worst
        )
