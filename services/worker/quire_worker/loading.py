"""Loads a model folder into a runnable model. All other modules of the worker load models through this one.

This module knows the order of the steps (config, spec, weights, pages); other modules know each step.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from quire_common.credit import PageGeometry
from quire_common.errors import Unsupported
from quire_worker.kv.page_geometry import kv_groups, page_geometry
from quire_worker.kv.page_pool import PagePool
from quire_worker.model.arch_spec import DecoderSpec
from quire_worker.model.architectures import has_family
from quire_worker.ops.backends import backend_on, make_ops
from quire_worker.ops.interface import HeadShape
from quire_worker.runner import ModelRunner
from quire_worker.sources.family import FamilySource, family_source
from quire_worker.sources.model_files import open_model
from quire_worker.sources.options import DType, LoadFormat, LoadOptions, ModelImpl, Progress, Quantize
from quire_worker.sources.source import ModelFacts
from quire_worker.transformers_backend.source import TransformersSource, transformers_source

__all__ = [
    "DType", "LoadFormat", "LoadOptions", "LoadedModel", "ModelFacts", "ModelImpl", "Progress", "Quantize",
    "find_source", "load_model",
]  # fmt: skip  # a list of names
_KV_DTYPE = "float32"
# The page namespace names the kernels that computed a page. A release whose kernels give other bits needs a new name.
_PAGE_KINDS = {"cpu": b"cpu tiles", "torch": b"torch"}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that is ready to run."""

    runner: ModelRunner
    spec: DecoderSpec
    facts: ModelFacts
    geometry: PageGeometry
    num_pages: int
    """Of group 0, the dummy page included."""


def load_model(
    folder: str | Path, options: LoadOptions | None = None, progress: Progress = lambda *_: None
) -> LoadedModel:
    """Load a Hugging Face folder or a GGUF file for the CPU: weights, a KV pool of the options' bytes, and the ops.
    `progress` gets each phase's name, bytes done and bytes in all (0 and 0 if it has no size).

    Raises ConfigError if the model's files are bad or an option does not fit, Unsupported for a model or option that
    Quire does not have on the CPU. The caller must set the number of torch threads before. If torch computes layers,
    the number must not change afterwards (see SharingRunner).
    """
    options = options or LoadOptions()
    if options.kv_cache_dtype != "auto":
        raise Unsupported(
            "UNSUPPORTED_KV_CACHE_DTYPE",
            f"--kv-cache-dtype {options.kv_cache_dtype} is not supported on the CPU, which keeps KV in float32.",
            "Leave it out, or serve the model on a GPU.",
            param="kv_cache_dtype",
        )
    source = find_source(folder, options, progress)
    spec, weights = source.spec, source.load(options, progress)
    (group,) = kv_groups(spec, options.page_size, _KV_DTYPE)
    progress("pages", 0, options.kv_cache_bytes)
    pool = PagePool.of_bytes(group, options.page_size, options.kv_cache_bytes)
    progress("pages", options.kv_cache_bytes, options.kv_cache_bytes)
    progress("kernels", 0, 0)
    with torch.inference_mode():
        backend = backend_on("cpu", options.attention_backend)
        ops = make_ops(backend, HeadShape.of(spec), options.page_size)
        decoder = weights.decoder(ops)
    # Backends differ in the last bits, so one must not read the other's pages: answers would depend on who stored them.
    computed = weights.digest + source.page_kind() + _PAGE_KINDS[backend]
    return LoadedModel(
        ModelRunner(decoder, pool),
        spec,
        source.facts(weights, batch_invariant=decoder.batch_invariant),
        page_geometry(spec, options.page_size, _KV_DTYPE, computed),
        pool.num_pages,
    )


def find_source(folder: str | Path, options: LoadOptions, progress: Progress) -> FamilySource | TransformersSource:
    """Read the config of a model folder or GGUF file, for the implementation that `model_impl` names; no weights are
    read. `auto` is a family of Quire's own if it covers the model (see `has_family`) or the file is GGUF, else the
    Transformers backend. Raises the ConfigError and Unsupported of `open_model` and of that implementation's source."""
    opened = open_model(folder, options, progress)
    impl = options.model_impl
    if impl == "auto":
        impl = "quire" if opened.gguf is not None or has_family(opened.config) else "transformers"
    return family_source(opened, options) if impl == "quire" else transformers_source(opened, options)
