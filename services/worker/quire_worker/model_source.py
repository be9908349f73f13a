"""From the configuration to a ServedModel: where torch is imported, and the model's facts become the contract's."""

from __future__ import annotations

import contextlib
import os
import platform
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from quire_common.config import parse_object
from quire_common.credit import ModelInfo, SamplingDefaults
from quire_common.errors import ConfigError, Unsupported
from quire_common.gguf import is_gguf
from quire_common.logits_processors import capabilities_of
from quire_common.model_hub import resolve_model
from quire_worker.matcher.matcher_factory import grammar_capabilities
from quire_worker.matcher.step_masks import MAX_CONSTRAINED_ROW_TOKENS, ForcedTokens
from quire_worker.model.generation_config import sampling_defaults
from quire_worker.replica import ServedModel, from_host, on_host
from quire_worker.sampling.logits_processor import load_processors
from quire_worker.step_work import known_work
from quire_worker.threads.cores import usable_cores
from quire_worker.weights.read_ahead import read_ahead

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import Tensor

    from quire_worker import loading
    from quire_worker.config import WorkerConfig
    from quire_worker.cuda.load import LoadedCudaModel
    from quire_worker.engine.ports import Device, Runner
    from quire_worker.engine.spec import EngineSpec
    from quire_worker.kv_transfer.copier import Copier
    from quire_worker.kv_transfer.ring import Ring
    from quire_worker.loading import DType, LoadOptions
    from quire_worker.model.step_decoder import StepDecoder
    from quire_worker.runner import ModelRunner
    from quire_worker.sampling.logits_processor import LogitsProcessors


# vLLM's name for its own implementations.
_IMPLEMENTATIONS = {"vllm": "quire"}


def _nobody(decoder: StepDecoder[Any], pages: Tensor) -> None:
    """Do nothing: the default of `load_configured`'s `show`."""


def with_model_path(config: WorkerConfig, progress: Callable[[str, int, int], None]) -> WorkerConfig:
    """Return the configuration with the path of its model in place of a name of the hub; the model keeps that name
    towards clients. Blocks while it downloads missing files, and calls `progress("download", bytes downloaded, bytes in
    all)`. A text that is neither a path nor a name of the hub stays as it is. Raises ConfigError if --revision is
    malformed, or the model cannot be found in the hub or downloaded."""
    path = resolve_model(
        config.model,
        config.revision,
        config.download_dir,
        progress=lambda done, total: progress("download", done, total),
    )
    return config if path == config.model else replace(config, model=path, served_model_name=config.name)


def load_configured(
    config: WorkerConfig,
    progress: Callable[[str, int, int], None],
    show: Callable[[StepDecoder[Any], Tensor], None] = _nobody,
) -> ServedModel:
    """Import torch, set its number of threads (--torch-threads, else the usable cores at most), and load the configured
    model. Meanwhile its weight files are read ahead, unless --load-format is dummy. The model goes on a GPU if --device
    is cuda, or auto and torch finds one; else on the CPU. Before the weights, the logits processors and the model's
    sampling defaults are loaded; at the end, another process may test whether grammars can be applied. `progress` gets
    each phase's name, bytes done and bytes in all (0 and 0 if it has no size). `show` is called with the decoder and
    its pages (as in Ops.plan), before any device is made. Raises ConfigError for a setting, file or machine that does
    not fit, Unsupported for a model or option that Quire does not have."""
    _check(config)
    with contextlib.nullcontext() if config.load_format == "dummy" else read_ahead(Path(config.model)):
        return _load(config, progress, show)


def _load(
    config: WorkerConfig,
    progress: Callable[[str, int, int], None],
    show: Callable[[StepDecoder[Any], Tensor], None],
) -> ServedModel:
    """Import torch and load the model, as `load_configured` says."""
    progress("imports", 0, 0)
    # Here and not above: torch takes seconds to import, and the port is to be open meanwhile.
    import torch

    from quire_worker.loading import LoadFormat, LoadOptions, ModelImpl, Quantize, load_model

    # torch's own choice follows affinity, and knows no quota.
    torch.set_num_threads(config.torch_threads or min(torch.get_num_threads(), usable_cores()))
    on_gpu = config.device == "cuda" or (config.device == "auto" and torch.cuda.is_available())
    options = LoadOptions(
        load_format=cast("LoadFormat", config.load_format),
        model_impl=cast("ModelImpl", _IMPLEMENTATIONS.get(config.model_impl, config.model_impl)),
        seed=config.seed,
        page_size=config.page_size_on("cuda" if on_gpu else "cpu"),
        kv_cache_bytes=config.kv_cache_bytes,
        max_model_len=config.max_model_len,
        attention_backend=config.attention_backend,
        kv_cache_dtype=config.kv_cache_dtype,
        dtype=cast("DType", config.dtype),
        quantize=cast("Quantize", config.quantize),
        hf_overrides=parse_object(config.hf_overrides, "--hf-overrides") if config.hf_overrides else {},
    )
    processors = load_processors(config.logits_processors, Path(config.model))
    # Before the weights, which take time: a mistake is told at once.
    defaults = sampling_defaults(Path(config.model), config.generation_config, config.override_generation_config)
    if on_gpu:
        return _load_on_gpu(config, options, processors, defaults, progress, show)
    _check_memory(config)
    loaded = load_model(config.model, options, progress)
    _check_promise(config, loaded)
    show(loaded.runner.decoder, loaded.runner.pool.tensor)
    return ServedModel(
        on_host(_sharing(loaded.runner, config), ForcedTokens()),
        from_host(loaded.runner.pool),
        model_info(
            config.name,
            loaded,
            processors,
            defaults,
            grammar_capabilities(config, loaded.facts.vocab_size, loaded.facts.eos_token_ids),
        ),
        loaded.num_pages,
        logits_processors=processors,
        work=known_work(loaded.spec, loaded.geometry, loaded.facts.weight_bytes),
        max_constrained_row_tokens=MAX_CONSTRAINED_ROW_TOKENS,
        model_path=config.model,
    )


def _sharing(runner: ModelRunner, config: WorkerConfig) -> Runner:
    """Wrap the runner so that it uses fewer threads while neighbours need the cores. Returns the runner itself if
    --torch-threads fixes the number, there is one thread, or torch computes layers: its products have other bits with
    another number of threads."""
    import torch

    from quire_worker.ops.cpu.cpu_ops import CpuOps
    from quire_worker.threads.sharing_runner import SharingRunner

    decoder = runner.decoder
    fixed = config.torch_threads or torch.get_num_threads() == 1
    same_bits = decoder.ops_compute_layers and isinstance(decoder.ops, CpuOps)
    return SharingRunner(runner) if same_bits and not fixed else runner


def _load_on_gpu(
    config: WorkerConfig,
    options: LoadOptions,
    processors: LogitsProcessors,
    defaults: SamplingDefaults,
    progress: Callable[[str, int, int], None],
    show: Callable[[StepDecoder[Any], Tensor], None],
) -> ServedModel:
    """Load the model's weights and KV pages onto the GPU; the returned ServedModel makes the device and the copier
    later, and has the descriptor of the pages' memory unless --peer-listen is off. `progress` and `show` are called as
    `load_configured` says. Raises ConfigError NO_GPU if torch finds no GPU, and Unsupported for another --dtype than
    bfloat16, for --quantize, or if --batch-invariant cannot be kept. Grammars are applied only on x86-64, as MaskRing
    requires."""
    import torch

    if config.dtype not in ("auto", "bfloat16"):
        raise Unsupported(
            "UNSUPPORTED_DTYPE",
            f"--dtype {config.dtype} is not supported on a GPU, whose kernels compute in bfloat16.",
            "Leave it out, or give --device cpu.",
            param="dtype",
        )
    if config.quantize != "none":
        raise Unsupported(
            "UNSUPPORTED_QUANTIZATION",
            f"--quantize {config.quantize} is not supported on a GPU.",
            "Leave it out, or give --device cpu.",
            param="quantize",
        )
    if not torch.cuda.is_available():
        raise ConfigError(
            "NO_GPU",
            "--device cuda was given, and torch finds no CUDA device.",
            "Install a CUDA build of torch and check the driver with nvidia-smi, or give --device cpu.",
            param="device",
        )
    from quire_worker.cuda.cuda_copier import CudaCopier
    from quire_worker.cuda.load import CudaOptions, load_cuda_model

    sizes = CudaOptions(
        max_num_seqs=config.sequences_on("cuda"),
        max_tokens=config.max_num_batched_tokens,
        utilization=config.gpu_memory_utilization,
        kv_cache_bytes=config.kv_cache_memory_bytes,
        batch_invariant=config.batch_invariant,
    )
    loaded = load_cuda_model(config.model, options, sizes, progress)
    _check_promise(config, loaded)
    show(loaded.model.decoder, loaded.model.pages)

    def make_device(spec: EngineSpec, lockstep: bool) -> Device:
        progress("graphs", 0, 0)
        return loaded.model.make_device(spec, loaded.max_tokens, eager=config.enforce_eager)

    # On other processors stores become visible in another order than a GPU relies on: see MaskRing.
    in_order = platform.machine() in ("x86_64", "AMD64")
    facts = loaded.facts
    grammars = grammar_capabilities(config, facts.vocab_size, facts.eos_token_ids) if in_order else ()
    info = model_info(config.name, loaded, processors, defaults, grammars)

    def make_copier(ring: Ring) -> Copier:
        return CudaCopier(loaded.pages, ring, config.worker_timeout_s)

    memory = loaded.pages.descriptor() if config.peer_listen != "off" else b""
    return ServedModel(
        make_device,
        make_copier,
        info,
        loaded.pages.num_pages,
        "cuda",
        processors,
        memory,
        loaded.max_tokens,
        known_work(loaded.model.decoder.spec, loaded.geometry, loaded.facts.weight_bytes),
        model_path=config.model,
    )


def model_info(
    name: str,
    loaded: loading.LoadedModel | LoadedCudaModel,
    processors: Iterable[str] = (),
    defaults: SamplingDefaults = (),
    further: tuple[str, ...] = (),
) -> ModelInfo:
    """Return the ModelInfo of a loaded model, which schedulers get. Its capabilities are the model's own, one for each
    logits processor, and the `further` ones."""
    facts = loaded.facts
    return ModelInfo(
        name=name,
        architecture=facts.architecture,
        max_model_len=facts.max_model_len,
        vocab_size=facts.vocab_size,
        eos_token_ids=facts.eos_token_ids,
        digest=facts.digest,
        pages=loaded.geometry,
        parameters=facts.parameters,
        weights_version=facts.digest.hex()[:16],
        capabilities=facts.capabilities + capabilities_of(processors) + further,
        sampling_defaults=defaults,
    )


def _check(config: WorkerConfig) -> None:
    """Raise ConfigError if no model is named, if its path is neither a folder nor a GGUF file, or cannot be looked up,
    or if --device cpu is given with a KV cache larger than this host's memory."""
    if not config.model:
        raise ConfigError("MODEL_MISSING", "No model is configured.", "Give its folder with --model.", param="model")
    path = Path(config.model)
    try:
        (path / "config.json").exists()  # This fails if the folder, or one above it, may not be searched.
        found = path.is_dir() or is_gguf(path)
    except OSError as error:
        raise ConfigError(
            "MODEL_NOT_FOUND",
            f"{path} cannot be looked up: {error.strerror}.",
            "Check the path, and that the worker may search its folders.",
            param="model",
        ) from error
    if not found:  # The loader says so too, but only seconds later.
        raise ConfigError(
            "MODEL_NOT_FOUND",
            f"There is no model folder or GGUF file {config.model}.",
            "Give the path of a Hugging Face folder or a GGUF file with --model.",
            param="model",
        )
    if config.device == "cpu":  # with auto, only torch knows where pages will be
        _check_memory(config)


def _check_promise(config: WorkerConfig, loaded: loading.LoadedModel | LoadedCudaModel) -> None:
    """Raise Unsupported if --batch-invariant is given and the loaded model's bits depend on the batch."""
    if config.batch_invariant and "batch_invariant" not in loaded.facts.capabilities:
        raise Unsupported(
            "NOT_BATCH_INVARIANT",
            f"--batch-invariant was given, and the bits of {loaded.facts.architecture} depend on the batch: "
            "it runs in the Transformers backend, or the GEMMs of this machine depend on the number of rows.",
            "Leave --batch-invariant out.",
            param="batch_invariant",
        )


def _check_memory(config: WorkerConfig) -> None:
    """Raise ConfigError if the KV cache is larger than this host's memory."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if config.kv_cache_bytes > memory:
        raise ConfigError(
            "KV_CACHE_TOO_LARGE",
            f"--kv-cache-memory-bytes {config.kv_cache_bytes} is more than this host's {memory} bytes of memory.",
            "Choose a smaller KV cache.",
            param="kv_cache_memory_bytes",
        )
