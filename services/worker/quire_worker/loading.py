"""From a model folder to something that runs: the one entrance to models for the rest of the worker.

It knows the order of things (config, spec, weights, pages); each step's knowledge lives elsewhere.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, Literal

import torch
import xxhash

from quire_common.credit import PageGeometry
from quire_common.errors import ConfigError, Unsupported
from quire_common.gguf import GgufModel, gguf_files, is_gguf, open_gguf
from quire_common.gguf.block_kinds import BlockKind
from quire_common.request_parameters import DRAW_NUMBERS
from quire_worker.kv.page_geometry import kv_groups, page_geometry
from quire_worker.kv.page_pool import PagePool
from quire_worker.model.arch_spec import ArchSpec
from quire_worker.model.architectures import find_family
from quire_worker.model.architectures.config_check import check_config
from quire_worker.model.architectures.family import Family
from quire_worker.model.config_facts import context_length, eos_token_ids
from quire_worker.model.config_file import ConfigFile, read_json
from quire_worker.model.decoder import Decoder
from quire_worker.model.parameters import ParameterSpec, parameter_specs
from quire_worker.ops.backends import backend_on, make_ops
from quire_worker.ops.interface import HeadShape
from quire_worker.runner import ModelRunner
from quire_worker.weights.checkpoint import Checkpoint, raise_for_gguf_files
from quire_worker.weights.gguf.config_fields import read_config as read_gguf_config
from quire_worker.weights.gguf.loader import block_kinds as gguf_block_kinds
from quire_worker.weights.gguf.loader import load_gguf
from quire_worker.weights.int8_blocks import int8_specs, quantize_int8
from quire_worker.weights.loader import DUMMY_KIND, load_checkpoint, load_dummy
from quire_worker.weights.loader import block_kinds as checkpoint_block_kinds
from quire_worker.weights.parameter_store import ParameterStore
from quire_worker.weights.rounding import check_rounded, rounded_kinds

LoadFormat = Literal["auto", "safetensors", "gguf", "dummy"]
DType = Literal["auto", "bfloat16", "float16", "float32"]
Quantize = Literal["none", "int8"]
CAPABILITIES = (
    "greedy", *(each.name for each in DRAW_NUMBERS), "seed", "logprobs", "min_tokens", "penalties", "logit_bias",
    "allowed_token_ids", "bad_words", "repetition_detection", "prompt_logprobs", "thinking_token_budget",
)  # fmt: skip  # a list of names
_KV_DTYPE = "float32"
# The page namespace names the kernels that computed a page. A release whose kernels give other bits needs a new name.
_PAGE_KINDS = {"cpu": b"cpu tiles", "torch": b"torch"}
# Fields of config.json that say nothing about what the model computes.
_VOLATILE = ("_name_or_path", "transformers_version")


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """What may be chosen about a model."""

    load_format: LoadFormat = "auto"
    seed: int = 0
    """Of dummy weights."""
    page_size: int = 16
    kv_cache_bytes: int = 256 << 20
    max_model_len: int = 0
    """0: the model's own context."""
    attention_backend: str = "auto"
    """See ops.backends."""
    kv_cache_dtype: str = "auto"
    """Or fp8, fp8_e4m3."""
    dtype: DType = "auto"
    """bfloat16, float16: linear and embedding weights of a wider or another float type are rounded to it."""
    quantize: Quantize = "none"
    """int8: linear and embedding weights of floats become int8 blocks."""
    hf_overrides: Mapping[str, Any] = field(default_factory=dict)
    """Fields that replace those of config.json; null removes one."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What others want to know of a loaded model; the domain form of quire.v1.ModelInfo."""

    architecture: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    digest: bytes
    """Of weights and config."""
    parameters: int
    capabilities: tuple[str, ...] = CAPABILITIES


Progress = Callable[[str, int, int], None]
"""(phase: config, weights, pages, kernels; done_bytes; total_bytes), called from the loading thread."""


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model folder, or GGUF file, that was read and understood; weights are still where they are."""

    path: Path
    config: ConfigFile
    architecture: str
    family: Family
    spec: ArchSpec
    parameters: tuple[ParameterSpec, ...]
    max_model_len: int
    gguf: GgufModel | None = None

    def fill(self, store: ParameterStore, options: LoadOptions, progress: Progress) -> bytes:
        """Read, or make up, all weights; returns the digest of weights and config."""

        def weights_progress(done: int, total: int) -> None:
            progress("weights", done, total)

        with torch.inference_mode():
            if options.load_format == "dummy":
                weights = load_dummy(self.parameters, store, options.seed, weights_progress)
            elif self.gguf is not None:
                weights = load_gguf(self.gguf, self.parameters, self.spec, store, weights_progress)
            else:
                with Checkpoint(self.path) as checkpoint:
                    weights = load_checkpoint(checkpoint, self.parameters, self.family.names, store, weights_progress)
        return _model_digest(self.config, weights)

    def block_kinds(self, options: LoadOptions) -> dict[tuple[str, int], BlockKind]:
        """The block kinds in which the model has its linear and embedding weights, by role and layer."""
        products = [each for each in self.parameters if len(each.shape) == 2]
        if options.load_format == "dummy":
            return {(each.role, each.layer): DUMMY_KIND for each in products}
        if self.gguf is not None:
            return gguf_block_kinds(self.gguf, products)
        with Checkpoint(self.path) as checkpoint:
            return checkpoint_block_kinds(checkpoint, products, self.family.names)

    def facts(self, digest: bytes, *, batch_invariant: bool) -> ModelFacts:
        """What others want to know of it."""
        return ModelFacts(
            architecture=self.architecture,
            max_model_len=self.max_model_len,
            vocab_size=self.spec.vocab_size,
            eos_token_ids=eos_token_ids(self.path, self.config),
            digest=digest,
            parameters=sum(prod(each.shape) for each in self.parameters),
            capabilities=CAPABILITIES + ("batch_invariant",) * batch_invariant,
        )


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that is ready to run."""

    runner: ModelRunner
    spec: ArchSpec
    facts: ModelFacts
    geometry: PageGeometry
    num_pages: int
    """Of group 0, the dummy page included."""


def load_model(
    folder: str | Path, options: LoadOptions | None = None, progress: Progress = lambda *_: None
) -> LoadedModel:
    """Load a Hugging Face folder or a GGUF file for the CPU.

    Raises ConfigError or Unsupported, which say what is wrong with it and what to do. The number of torch threads must
    be set before, and must not change after.
    """
    options = options or LoadOptions()
    if options.kv_cache_dtype != "auto":
        raise Unsupported(
            "UNSUPPORTED_KV_CACHE_DTYPE",
            f"--kv-cache-dtype {options.kv_cache_dtype} is not supported on the CPU, which keeps KV in float32.",
            "Leave it out, or serve the model on a GPU.",
            param="kv_cache_dtype",
        )
    source = read_source(folder, options, progress)
    spec, kinds = source.spec, source.block_kinds(options)
    rounded = rounded_kinds(kinds, options.dtype)
    store = ParameterStore(source.parameters, stored=kinds | rounded)
    digest = source.fill(store, options, progress)
    if rounded:
        check_rounded(store, [each for each in source.parameters if (each.role, each.layer) in rounded])
        digest = xxhash.xxh3_128(digest + options.dtype.encode()).digest()
    if options.quantize == "int8" and (changed := int8_specs(source.parameters, kinds | rounded)):
        with torch.inference_mode():
            quantize_int8(store, changed)
        digest = xxhash.xxh3_128(digest + options.quantize.encode()).digest()
    (group,) = kv_groups(spec, options.page_size, _KV_DTYPE)
    progress("pages", 0, options.kv_cache_bytes)
    pool = PagePool.of_bytes(group, options.page_size, options.kv_cache_bytes)
    progress("pages", options.kv_cache_bytes, options.kv_cache_bytes)
    progress("kernels", 0, 0)
    with torch.inference_mode():
        backend = backend_on("cpu", options.attention_backend)
        ops = make_ops(backend, HeadShape.of(spec), options.page_size)
        runner = ModelRunner(Decoder(spec, store, ops, source.max_model_len), pool)
    # Backends differ in the last bits, so one must not read the other's pages: answers would depend on who stored them.
    computed = digest + _PAGE_KINDS[backend]
    return LoadedModel(
        runner,
        spec,
        source.facts(digest, batch_invariant=ops.batch_invariant),
        page_geometry(spec, options.page_size, _KV_DTYPE, computed),
        pool.num_pages,
    )


def read_source(folder: str | Path, options: LoadOptions, progress: Progress) -> ModelSource:
    """Understand a model folder or GGUF file, without its weights. Raises ConfigError or Unsupported."""
    path = Path(folder)
    progress("config", 0, 0)
    gguf = open_gguf(path) if is_gguf(path) else None
    _check_load_format(path, options.load_format, gguf is not None)
    config = _read_config(path) if gguf is None else read_gguf_config(gguf)
    config = config.overridden(options.hf_overrides)
    _check_not_quantized(config)
    architecture, family = find_family(config)
    check_config(config, family)
    spec = family.build_spec(architecture, config)
    max_model_len = context_length(config, options.max_model_len)
    return ModelSource(path, config, architecture, family, spec, parameter_specs(spec), max_model_len, gguf)


def _check_load_format(path: Path, load_format: LoadFormat, is_file: bool) -> None:
    """Raise ConfigError where --load-format names another format than the model has."""
    if (load_format == "safetensors" and is_file) or (load_format == "gguf" and path.is_dir()):
        files = gguf_files(path)
        named = f", or name a file: `--model {files[0]}`" if files else ""
        raise ConfigError(
            "LOAD_FORMAT_MISMATCH",
            f"--load-format {load_format} was given, and {path} is a {'GGUF file' if is_file else 'folder'}.",
            f"Leave --load-format out{named}.",
            param="load_format",
        )


def _read_config(path: Path) -> ConfigFile:
    if not path.is_dir():
        raise ConfigError(
            "MODEL_NOT_FOUND",
            f"There is no model folder or GGUF file {path}.",
            "Give the path of a Hugging Face folder or a GGUF file.",
        )
    file = path / "config.json"
    if not file.is_file():
        raise_for_gguf_files("MISSING_CONFIG", path, "config.json")
        raise ConfigError("MISSING_CONFIG", f"{path} has no config.json.", "Download the whole model folder.")
    return ConfigFile(read_json(file), str(file))


def _check_not_quantized(config: ConfigFile) -> None:
    """Raise Unsupported for a config.json that says that weights are quantized."""
    if config.has("quantization_config"):
        raise Unsupported(
            "UNSUPPORTED_QUANTIZATION",
            f"{config.source} describes quantised weights, which are not supported.",
            "Serve the unquantised checkpoint.",
        )


def _model_digest(config: ConfigFile, weights: bytes) -> bytes:
    """xxh3 over the weights' digest and the canonical config."""
    kept: dict[str, Any] = {name: value for name, value in config.fields.items() if name not in _VOLATILE}
    canonical = json.dumps(kept, sort_keys=True, separators=(",", ":")).encode()
    return xxhash.xxh3_128(weights + canonical).digest()
