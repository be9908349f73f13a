"""From a model folder to something that runs on a GPU. What is the same on every device is in loading.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from quire_common.credit import PageGeometry
from quire_worker.cuda.cuda_model import CudaModel
from quire_worker.cuda.cuda_pages import CudaPages
from quire_worker.cuda.kernel_limits import check_kernels
from quire_worker.cuda.memory import kv_cache_bytes, naming_out_of_memory, step_bytes
from quire_worker.cuda.step_size import MOST_CHUNKS
from quire_worker.kv.page_geometry import kv_groups, page_geometry
from quire_worker.loading import LoadOptions, ModelFacts, Progress, find_source
from quire_worker.ops.backends import backend_on
from quire_worker.ops.interface import HeadShape
from quire_worker.ops.triton.gemm_configs import gemm_configs_for
from quire_worker.ops.triton.triton_ops import TritonOps

if TYPE_CHECKING:
    from pathlib import Path

_STEP, _LARGE_STEP, _SMALL_WEIGHTS = 8192, 16_384, 2 << 30
_KV_DTYPES = {"auto": "bfloat16", "fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn"}


@dataclass(frozen=True, slots=True)
class CudaOptions:
    """What may be chosen about a model on a GPU, beside LoadOptions."""

    max_num_seqs: int = 256
    max_tokens: int = 0
    """Most prefill tokens of a step; 0: as many as suit the model."""
    utilization: float = 0.9
    """Share of the GPU's memory that may be in use in all: other processes' memory counts too."""
    kv_cache_bytes: int = 0
    """0: what the utilization leaves."""
    batch_invariant: bool = False
    """A request's bits do not depend on those beside it, at a price."""


@dataclass(frozen=True, slots=True)
class LoadedCudaModel:
    """A model that is ready to run."""

    model: CudaModel
    pages: CudaPages
    facts: ModelFacts
    geometry: PageGeometry
    max_tokens: int
    """Most prefill tokens of a step."""


def load_cuda_model(
    folder: str | Path, options: LoadOptions, cuda: CudaOptions, progress: Progress = lambda *_: None
) -> LoadedCudaModel:
    """Load a model folder or GGUF file onto the current GPU in bfloat16, and make its KV pages. They get the bytes
    that `cuda` names, or else the free memory, less the share that `utilization` leaves to others and a reserve for the
    largest step. If `cuda` names no limit of tokens in a step, the weights' size decides it. `progress` gets each
    phase's name, bytes done and bytes in all. Raises ConfigError if the model's files are bad, an option does not fit,
    or memory is too small for the weights or the pages. Raises Unsupported for a model or option that Quire does
    not have on a GPU."""
    device = torch.device("cuda", torch.cuda.current_device())
    source = find_source(folder, options, progress)
    source = source.measured()
    spec = source.spec
    attention = backend_on("cuda", options.attention_backend)
    check_kernels(spec, options.page_size)
    with naming_out_of_memory("the weights", "End other users of the GPU, or serve a smaller model."):
        weights = source.load(options, progress, device)
    max_tokens = cuda.max_tokens or step_tokens(weights.num_bytes)
    rows = max_tokens + cuda.max_num_seqs
    reserve = step_bytes(spec, rows, cuda.max_num_seqs + MOST_CHUNKS, spec.vocab_size)
    free, total = torch.cuda.mem_get_info(device)
    capacity = cuda.kv_cache_bytes or kv_cache_bytes(free, total, cuda.utilization, reserve)
    kv_dtype = _KV_DTYPES[options.kv_cache_dtype]
    (group,) = kv_groups(spec, options.page_size, kv_dtype)
    progress("pages", 0, capacity)
    with naming_out_of_memory(
        f"{capacity} bytes of KV pages",
        "Lower --kv-cache-memory-bytes, or --gpu-memory-utilization.",
        "kv_cache_memory_bytes",
    ):
        pages = CudaPages(group, options.page_size, capacity, device)
    progress("pages", capacity, capacity)
    gemm_configs = gemm_configs_for(torch.cuda.get_device_name(device), batch_invariant=cuda.batch_invariant)
    pdl = torch.cuda.get_device_capability(device)[0] >= 9
    beside = naming_out_of_memory(
        f"the logits and the decoder beside {capacity} bytes of KV pages",
        "Lower --kv-cache-memory-bytes, or --gpu-memory-utilization.",
        "kv_cache_memory_bytes",
    )
    with beside, torch.inference_mode():
        rows = cuda.max_num_seqs + MOST_CHUNKS
        logits = torch.empty((rows, spec.vocab_size), dtype=torch.bfloat16, device=device)
        ops = TritonOps(HeadShape.of(spec), device, gemm_configs, pdl=pdl, kept_logits=logits)
        decoder = weights.decoder(ops)
    pages_digest = weights.digest + source.page_kind() + page_kind(batch_invariant=cuda.batch_invariant)
    return LoadedCudaModel(
        CudaModel(decoder, pages.tensor, attention),
        pages,
        source.facts(weights, batch_invariant=decoder.batch_invariant),
        page_geometry(spec, options.page_size, kv_dtype, pages_digest),
        max_tokens,
    )


def page_kind(*, batch_invariant: bool) -> bytes:
    """Return the part of the pages' namespace that says how they were computed, in addition to model and type: on a
    GPU, with or without `--batch-invariant`.

    Pages of a CPU differ from those of a GPU in their last bits, and `--batch-invariant` promises exact bits. If a
    worker read pages of another kind, its answers would depend on which worker stored them. The attention backend is
    not part of the namespace. With `--batch-invariant`, both backends run the same kernels, since cuDNN is not used.
    Without it, the bits of a page depend on the size of the step that computed it anyway, so cudnn and triton differ no
    more than two steps of one worker.
    """
    return b"cuda even" if batch_invariant else b"cuda"


def step_tokens(weight_bytes: int) -> int:
    """Return the default for the most prefill tokens of a step: 16,384 for weights of less than 2 GiB, else 8192. More
    tokens make GEMMs more efficient, but sequences that decode wait for the step: 50 ms or so with 16,384 tokens of a
    small model."""
    return _LARGE_STEP if weight_bytes < _SMALL_WEIGHTS else _STEP
