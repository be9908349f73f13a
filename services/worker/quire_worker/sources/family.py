"""Models of Quire's own families."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import xxhash

from quire_common.gguf import GgufModel
from quire_common.gguf.block_kinds import BlockKind
from quire_worker.model.arch_spec import ArchSpec
from quire_worker.model.architectures import find_family
from quire_worker.model.architectures.family import Family
from quire_worker.model.config_check import check_config, check_model_type
from quire_worker.model.config_facts import context_length
from quire_worker.model.decoder import Decoder
from quire_worker.model.parameters import ParameterSpec, parameter_specs
from quire_worker.model.rope import depends_on_length
from quire_worker.model.text_part import TextPart
from quire_worker.ops.interface import Ops
from quire_worker.sources.model_files import ModelFiles
from quire_worker.sources.options import LoadOptions, Progress
from quire_worker.sources.source import ModelSource, model_digest
from quire_worker.weights.checkpoint import Checkpoint
from quire_worker.weights.gguf.architectures import find_architecture as find_gguf_architecture
from quire_worker.weights.gguf.loader import block_kinds as gguf_block_kinds
from quire_worker.weights.gguf.loader import load_gguf
from quire_worker.weights.int8_blocks import int8_specs, quantize_int8
from quire_worker.weights.loader import DUMMY_KIND, load_checkpoint, load_dummy
from quire_worker.weights.loader import block_kinds as checkpoint_block_kinds
from quire_worker.weights.parameter_store import ParameterStore
from quire_worker.weights.rounding import check_rounded, rounded_kinds


@dataclass(frozen=True, slots=True)
class FamilyWeights:
    """Implements `Weights` for a family of Quire's own."""

    source: FamilySource
    store: ParameterStore
    digest: bytes
    num_bytes: int

    @property
    def parameters(self) -> int:
        """See `Weights`."""
        return sum(prod(each.shape) for each in self.source.parameters)

    def decoder(self, ops: Ops[Any]) -> Decoder[Any]:
        """See `Weights`."""
        return Decoder(self.source.spec, self.store, ops, self.source.max_model_len)


@dataclass(frozen=True, slots=True)
class FamilySource(ModelSource):
    """A model of a family of Quire's own."""

    spec: ArchSpec
    family: Family
    parameters: tuple[ParameterSpec, ...]
    gguf: GgufModel | None = None
    part: TextPart | None = None

    def load(self, options: LoadOptions, progress: Progress, device: torch.device | None = None) -> FamilyWeights:
        """Read or make the weights, for a GPU `device` in bfloat16, whatever `dtype` and `quantize` say. On the CPU,
        linear and embedding weights stay as the files have them, or are rounded (`dtype`) and quantized (`quantize`) as
        the options say; the digest covers this too. All other weights are float32. Raises the errors of the loaders
        and, on the CPU, ConfigError for values that the type cannot hold."""
        if device is not None:
            store = ParameterStore(self.parameters, torch.bfloat16, device)
            return FamilyWeights(self, store, self.fill(store, options, progress), store.num_bytes)
        kinds = self.block_kinds(options)
        rounded = rounded_kinds(kinds, options.dtype)
        store = ParameterStore(self.parameters, stored=kinds | rounded)
        digest = self.fill(store, options, progress)
        if rounded:
            check_rounded(store, [each for each in self.parameters if (each.role, each.layer) in rounded])
            digest = xxhash.xxh3_128(digest + options.dtype.encode()).digest()
        if options.quantize == "int8" and (changed := int8_specs(self.parameters, kinds | rounded)):
            with torch.inference_mode():
                quantize_int8(store, changed)
            digest = xxhash.xxh3_128(digest + options.quantize.encode()).digest()
        return FamilyWeights(self, store, digest, store.num_bytes)

    def fill(self, store: ParameterStore, options: LoadOptions, progress: Progress) -> bytes:
        """Fill the store with all weights: random ones for `dummy`, else those of the GGUF file or the safetensors.
        `progress` gets the bytes. Returns the digest of weights and config."""

        def weights_progress(done: int, total: int) -> None:
            progress("weights", done, total)

        with torch.inference_mode():
            if options.load_format == "dummy":
                weights = load_dummy(self.parameters, store, options.seed, weights_progress)
            elif self.gguf is not None:
                weights = load_gguf(self.gguf, self.parameters, store, weights_progress)
            else:
                with Checkpoint(self.path, self.part) as checkpoint:
                    weights = load_checkpoint(checkpoint, self.parameters, self.family, store, weights_progress)
        return model_digest(self.config, weights)

    def block_kinds(self, options: LoadOptions) -> dict[tuple[str, int], BlockKind]:
        """Return the block kinds in which the model's files store the linear and embedding weights, by role and layer.
        With random weights, all have the same kind. Weights that the files lack are left out, and so are those of
        safetensors in a type that Quire does not support; kinds of a GGUF file are not checked here."""
        matrices = [each for each in self.parameters if each.is_matrix]
        if options.load_format == "dummy":
            return {(each.role, each.layer): DUMMY_KIND for each in matrices}
        if self.gguf is not None:
            return gguf_block_kinds(self.gguf, matrices)
        with Checkpoint(self.path, self.part) as checkpoint:
            return checkpoint_block_kinds(checkpoint, matrices, self.family)

    def page_kind(self) -> bytes:
        """See `ModelSource.page_kind`. The kind says whether sequences may be so long that RoPE has other angles."""
        is_long = any(depends_on_length(each.rope, self.max_model_len) for each in self.spec.attention)
        return b"long rope" * is_long


def family_source(opened: ModelFiles, options: LoadOptions) -> FamilySource:
    """Return the source of a model of a family of Quire's own: its checked config, spec, context length and list of
    parameters. No weights are read. Raises ConfigError if a value of the config is missing or wrong, or --max-model-len
    exceeds the context. Raises Unsupported for another architecture, or a config that asks for what the family does not
    compute."""
    path, config, gguf, part = opened
    architecture, family = find_family(config)
    check_model_type(config, family)
    usual = family.adapt(config)
    spec = family.build_spec(architecture, usual)
    check_config(usual, family)
    if gguf is not None:
        spec = find_gguf_architecture(gguf)[1].as_stored(spec)
    max_model_len = context_length(usual, options.max_model_len)
    return FamilySource(path, config, spec, max_model_len, family.of(usual), parameter_specs(spec), gguf, part)
