"""From the configuration to a ServedModel: where torch is imported, and the model's facts become the contract's."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, cast

from quire_common.credit import KvGroup, ModelInfo, PageGeometry
from quire_common.errors import ConfigError
from quire_worker.replica import ServedModel

if TYPE_CHECKING:
    from collections.abc import Callable

    from quire_worker import loading
    from quire_worker.config import WorkerConfig


def load_configured(config: WorkerConfig, progress: Callable[[str, int, int], None]) -> ServedModel:
    """Load the model that the configuration names; raises ConfigError or Unsupported with the cause."""
    _check(config)
    progress("imports", 0, 0)
    # Here and not above: torch takes seconds to import, and the port is to be open meanwhile.
    import torch

    from quire_worker.loading import LoadFormat, LoadOptions, load_model

    if config.torch_threads:
        torch.set_num_threads(config.torch_threads)
    options = LoadOptions(
        load_format=cast("LoadFormat", config.load_format),
        seed=config.seed,
        page_size=config.page_size,
        kv_cache_bytes=config.kv_cache_bytes,
        max_model_len=config.max_model_len,
        attention_backend=config.attention_backend,
    )
    loaded = load_model(config.model, options, progress)
    return ServedModel(loaded.runner, loaded.runner.pool, model_info(config.name, loaded), loaded.num_pages)


def model_info(name: str, loaded: loading.LoadedModel) -> ModelInfo:
    """The contract's words for a loaded model."""
    facts, geometry = loaded.facts, loaded.geometry
    groups = tuple(
        KvGroup(g.name, g.page_bytes, g.layout, g.dtype, g.layers, g.kv_heads, g.head_dim, g.window)
        for g in geometry.groups
    )
    return ModelInfo(
        name=name,
        architecture=facts.architecture,
        max_model_len=facts.max_model_len,
        vocab_size=facts.vocab_size,
        eos_token_ids=facts.eos_token_ids,
        digest=facts.digest,
        pages=PageGeometry(geometry.page_size, groups, geometry.namespace),
        parameters=facts.parameters,
        weights_version=facts.digest.hex()[:16],
        capabilities=facts.capabilities,
    )


def _check(config: WorkerConfig) -> None:
    if not config.model:
        raise ConfigError("MODEL_MISSING", "No model is configured.", "Give its folder with --model.", param="model")
    if not Path(config.model).is_dir():  # the loader says so too, but only seconds later
        raise ConfigError(
            "MODEL_NOT_FOUND",
            f"There is no model folder {config.model}.",
            "Give the path of a Hugging Face folder with --model.",
            param="model",
        )
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if config.kv_cache_bytes > memory:
        raise ConfigError(
            "KV_CACHE_TOO_LARGE",
            f"--kv-cache-memory-bytes {config.kv_cache_bytes} is more than this host's {memory} bytes of memory.",
            "Choose a smaller KV cache.",
            param="kv_cache_memory_bytes",
        )
