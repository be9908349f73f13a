"""The CPU engine with a small model: real kernels, real sampling, real pages."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from quire.models import find_model
from quire_common.credit import Finish
from quire_worker.loading import LoadOptions, load_model
from quire_worker.model_source import model_info
from quire_worker.sampling.logits_state import LogitsState
from tests.exactness.scenario import Scale
from tests.exactness.subject import Answer, Memory, Parts
from tests.fakes.worker.local_matcher import FixedMask, letter_backend, masks_after
from tests.fakes.worker.some_processors import PROCESSORS
from tests.model.batches import Run, make_batch
from tests.model.folders import write_config
from tests.parity.real_models import real_model

if TYPE_CHECKING:
    from quire_common.sequence import Sequence
    from quire_worker.matcher.guidance_backend import GuidanceBackend


class CpuSubject:
    """One model for all lives; its pool keeps what lives before have left in it."""

    def __init__(self, name: str, folder: str | Path, scale: Scale, options: LoadOptions) -> None:
        torch.set_num_threads(1)
        self.scale = scale
        self._model = load_model(folder, replace(options, page_size=scale.page_size, max_model_len=scale.max_model_len))
        self.info = model_info(name, self._model)
        self._answers: dict[tuple[object, ...], Answer] = {}

    @classmethod
    def tiny(cls) -> CpuSubject:
        """Random weights."""
        scale = Scale(vocab_size=97, page_size=4, max_model_len=96, longest_prompt=40, most_tokens=40, most_asks=8)
        with tempfile.TemporaryDirectory() as folder:
            # Heads of 32 go through the compiled kernels.
            longest = scale.max_model_len
            config = write_config(Path(folder), head_dim=32, max_position_embeddings=longest, eos_token_id=[2, 3])
            return cls("tiny", config, scale, LoadOptions(load_format="dummy", seed=1, kv_cache_bytes=1 << 20))

    @classmethod
    def demo(cls) -> CpuSubject:
        """The trained model of the repository."""
        scale = Scale(vocab_size=4096, page_size=16, max_model_len=256, longest_prompt=96, most_tokens=24, most_asks=5)
        return cls("demo", find_model(None), scale, LoadOptions(kv_cache_bytes=32 << 20))

    @classmethod
    def smollm2(cls) -> CpuSubject:
        """A real model, its weights as the GGUF file stores them. The test is skipped where it cannot be had."""
        scale = Scale(vocab_size=49152, page_size=16, max_model_len=256, longest_prompt=96, most_tokens=24, most_asks=5)
        return cls("smollm2", real_model("smollm2"), scale, LoadOptions(kv_cache_bytes=128 << 20))

    @cached_property
    def backend(self) -> GuidanceBackend:
        return letter_backend(self.info.vocab_size, self.info.eos_token_ids)

    def parts(self, num_pages: int, seed: int) -> Parts:
        assert num_pages <= self._model.num_pages
        pool = self._model.runner.pool
        # [page, kv_head, layer, 2, token, dim], seen by page and token.
        memory = Memory(np.moveaxis(pool.tensor.numpy(), 4, 1))
        return Parts(self._model.runner, self._model.runner, pool, memory)

    def alone(self, sequence: Sequence, max_len: int) -> Answer:
        """The runner alone, one token at a time on pages of its own: no engine, no scheduler."""
        stop, sampling = sequence.stop, sequence.sampling
        key = (sequence.prompt_ids.tobytes(), sampling, stop, sequence.thinking, sequence.constraint, max_len)
        if key not in self._answers:
            self._answers[key] = self._run(sequence, max_len)
        return self._answers[key]

    def _run(self, sequence: Sequence, max_len: int) -> Answer:
        stop, sampling = sequence.stop, sequence.sampling
        ends = {*stop.stop_token_ids, *(() if stop.ignore_eos else self.info.eos_token_ids)}
        ends &= set(range(self.scale.vocab_size))
        tokens = sequence.prompt_ids.tolist()
        prompt, computed = len(tokens), 0
        size = self.scale.page_size
        pages = list(range(1, -(-max_len // size) + 1))
        logprobs: list[float] = []
        controls = LogitsState.of(sequence, PROCESSORS)
        constraint = sequence.constraint
        masks = None if constraint is None else masks_after(self.backend, constraint.text)
        while True:
            emitted = len(tokens) - prompt
            run = Run(
                tokens[computed:],
                computed,
                pages[: -(-len(tokens) // size)],
                sampling=sampling,
                logprobs=sampling.logprobs,
                blocked=sorted(ends) if emitted < stop.min_tokens else (),
                controls=controls,
                constraint=None if masks is None else FixedMask(masks(tokens[prompt:])),
            )
            computed = len(tokens)
            output = self._model.runner.run(make_batch([run]))
            tokens.append(int(output.token[0]))
            if output.logprobs is not None:
                logprobs.append(float(output.logprobs.logprob[0]))
            if tokens[-1] in ends:
                return Answer(tokens[prompt:], Finish.STOP, logprobs)
            if emitted + 1 >= stop.max_tokens or len(tokens) >= max_len:
                return Answer(tokens[prompt:], Finish.LENGTH, logprobs)
            if controls is not None:
                if controls.repeats(tokens[-1]):
                    return Answer(tokens[prompt:], Finish.REPETITION, logprobs)
                controls.fed(tokens[-1])
