"""ModelSource: a model whose config was read, ready to load its weights. `family.py` implements it for Quire's own
model families, `transformers_backend/source.py` for the Transformers backend."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

import torch
import xxhash

from quire_common.request_parameters import SAMPLING_NUMBERS
from quire_worker.model.arch_spec import DecoderSpec
from quire_worker.model.config_facts import eos_token_ids
from quire_worker.model.config_file import ConfigFile
from quire_worker.model.step_decoder import StepDecoder
from quire_worker.ops.interface import Ops
from quire_worker.sources.options import LoadOptions, Progress

CAPABILITIES = (
    "greedy", *(each.name for each in SAMPLING_NUMBERS), "seed", "logprobs", "min_tokens", "penalties", "logit_bias",
    "allowed_token_ids", "bad_words", "repetition_detection", "prompt_logprobs", "thinking_token_budget",
)  # fmt: skip  # a list of names
# Fields of config.json that say nothing about what the model computes.
_VOLATILE = ("_name_or_path", "transformers_version")


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The facts about a loaded model that other services may know; the domain form of quire.v1.ModelInfo."""

    architecture: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    digest: bytes
    """Digest of weights and config."""
    parameters: int
    weight_bytes: int
    """Memory that the weights take."""
    capabilities: tuple[str, ...] = CAPABILITIES


class Weights(Protocol):
    """A model's weights in memory, and the decoder that computes with them."""

    @property
    def digest(self) -> bytes:
        """Digest of weights, config and whatever else decides the contents of pages."""
        ...

    @property
    def parameters(self) -> int:
        """Numbers in all weights."""
        ...

    @property
    def num_bytes(self) -> int:
        """Memory that the weights take."""
        ...

    def decoder(self, ops: Ops[Any]) -> StepDecoder[Any]:
        """The decoder. It may take the weights for itself: call this once."""
        ...


@dataclass(frozen=True, slots=True)
class ModelSource(ABC):
    """A model folder or GGUF file whose config was read; its weights are not loaded yet."""

    path: Path
    config: ConfigFile
    spec: DecoderSpec
    max_model_len: int

    @abstractmethod
    def load(self, options: LoadOptions, progress: Progress, device: torch.device | None = None) -> Weights:
        """Read or make all weights: for a GPU in bfloat16, for the CPU (None) as the options say."""

    def measured(self) -> Self:
        """Return the source with `row_bytes` in its spec: the memory that steps take on a GPU for each row. Here it
        is the source itself, whose spec estimates this already."""
        return self

    @abstractmethod
    def page_kind(self) -> bytes:
        """Return a part of the pages' namespace: everything that decides the contents of pages, apart from weights,
        config and kernels."""

    def facts(self, weights: Weights, *, batch_invariant: bool) -> ModelFacts:
        """Return the facts of the model that other services get: its sizes, its EOS tokens (those of
        generation_config.json too, which is read now), the digest, number and bytes of its weights, and what the worker
        can do. `batch_invariant` is one of these capabilities."""
        return ModelFacts(
            architecture=self.spec.architecture,
            max_model_len=self.max_model_len,
            vocab_size=self.spec.vocab_size,
            eos_token_ids=eos_token_ids(self.path, self.config),
            digest=weights.digest,
            parameters=weights.parameters,
            weight_bytes=weights.num_bytes,
            capabilities=CAPABILITIES + ("batch_invariant",) * batch_invariant,
        )


def model_digest(config: ConfigFile, weights: bytes) -> bytes:
    """Return xxh3 (16 bytes) over the weights' digest and the config as canonical JSON, without fields that say nothing
    about what the model computes."""
    kept: dict[str, Any] = {name: value for name, value in config.fields.items() if name not in _VOLATILE}
    canonical = json.dumps(kept, sort_keys=True, separators=(",", ":")).encode()
    return xxhash.xxh3_128(weights + canonical).digest()
