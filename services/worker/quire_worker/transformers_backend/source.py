"""TransformersSource: a model of the Transformers backend whose config was read, ready to load its weights."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from quire_common.errors import ConfigError, Unsupported
from quire_common.telemetry.logs import get_logger
from quire_worker.model.arch_spec import TransformersSpec
from quire_worker.model.config_facts import context_length
from quire_worker.model.text_part import TextPart
from quire_worker.ops.interface import Ops
from quire_worker.sources.model_files import ModelFiles
from quire_worker.sources.options import LoadOptions, Progress
from quire_worker.sources.source import ModelSource, model_digest
from quire_worker.transformers_backend.decoder import TransformersDecoder
from quire_worker.transformers_backend.find_model import FoundModel, check_rope, find_model
from quire_worker.transformers_backend.graph_check import graph_defect
from quire_worker.transformers_backend.probe import read_spec
from quire_worker.transformers_backend.row_check import check_rows
from quire_worker.transformers_backend.step_memory import measure_row_bytes
from quire_worker.transformers_backend.weights import LoadedWeights, load_weights, make_dummy
from quire_worker.weights.checkpoint import Checkpoint

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class TransformersWeights:
    """Implements `Weights` for the Transformers backend."""

    source: TransformersSource
    loaded: LoadedWeights
    digest: bytes
    device: torch.device

    @property
    def parameters(self) -> int:
        """See `Weights`."""
        return self.loaded.parameters

    @property
    def num_bytes(self) -> int:
        """See `Weights`."""
        return self.loaded.num_bytes

    def decoder(self, ops: Ops[Any]) -> TransformersDecoder[Any]:
        """Make the decoder. On a GPU, first let Quire's kernels compute the modules that they can, test whether a pass
        can be captured as a CUDA graph, and log both."""
        spec, model = self.source.spec, self.loaded.model
        if self.device.type != "cuda":
            return TransformersDecoder(spec, model, ops, self.device, can_be_captured=False)
        from quire_worker.transformers_backend.fused_modules import fuse_modules  # which imports Triton

        fused = fuse_modules(model, ops)
        defect = graph_defect(model, spec.vocab_size, spec.max_positions, self.device)
        log.info("the Transformers backend is ready", fused_modules=fused, cuda_graphs=not defect, reason=defect)
        return TransformersDecoder(spec, model, ops, self.device, can_be_captured=not defect)


@dataclass(frozen=True, slots=True)
class TransformersSource(ModelSource):
    """Implements `ModelSource` for the Transformers backend."""

    spec: TransformersSpec
    found: FoundModel
    part: TextPart | None = None

    def load(self, options: LoadOptions, progress: Progress, device: torch.device | None = None) -> TransformersWeights:
        """Load the weights, or make random ones for the load format dummy: in float32 on the CPU (`device` None), in
        bfloat16 on a GPU. Raises Unsupported if `dtype` or `quantize` asks for other weights on the CPU, and for a
        model that `check_rows` refuses. Also raises the errors of `load_weights`."""
        place = torch.device("cpu") if device is None else device
        dtype = torch.float32 if device is None else torch.bfloat16
        if device is None:
            self._check_plain(options)
        if options.load_format == "dummy":
            loaded = make_dummy(self.found, dtype, place, options.seed)
        else:
            with Checkpoint(self.path, self.part) as checkpoint:
                loaded = load_weights(
                    self.found, checkpoint, dtype, place, lambda done, total: progress("weights", done, total)
                )
        check_rows(self.spec, loaded.model, place)
        return TransformersWeights(self, loaded, model_digest(self.config, loaded.digest), place)

    def measured(self) -> TransformersSource:
        """See `ModelSource.measured`. Raises Unsupported for layers that do not compute in bfloat16."""
        return replace(self, spec=replace(self.spec, measured_row_bytes=measure_row_bytes(self.found)))

    def page_kind(self) -> bytes:
        """See `ModelSource.page_kind`: the code that computes keys and values. Those of a family have other bits."""
        return f"transformers {self.found.version}".encode()

    def _check_plain(self, options: LoadOptions) -> None:
        """Raise Unsupported if `dtype` or `quantize` asks for other weights than float32. Called for the CPU, on which
        this backend computes in float32 alone."""
        for code, option, given, plain in (
            ("UNSUPPORTED_DTYPE", "dtype", options.dtype, ("auto", "float32")),
            ("UNSUPPORTED_QUANTIZATION", "quantize", options.quantize, ("none",)),
        ):
            if given not in plain:
                raise Unsupported(
                    code,
                    f"--{option} {given} is not supported: this model runs in the Transformers backend, which computes "
                    "in float32 on the CPU.",
                    "Leave it out.",
                    param=option,
                )


def transformers_source(opened: ModelFiles, options: LoadOptions) -> TransformersSource:
    """Find a model's class in transformers, and read its sizes and attention, but no weights. Raises ConfigError for
    GGUF files and wrong configs, and Unsupported for models that the backend cannot run."""
    path, config, gguf, part = opened
    if gguf is not None:
        raise ConfigError(
            "LOAD_FORMAT_MISMATCH",
            f"--model-impl transformers was given, and {path} is a GGUF file.",
            "Name a folder with safetensors, or leave --model-impl out.",
            param="model_impl",
        )
    found = find_model(config)
    max_model_len = context_length(found.with_context(config), options.max_model_len)
    check_rope(found, max_model_len)
    return TransformersSource(path, config, read_spec(found, max_model_len), max_model_len, found, part)
