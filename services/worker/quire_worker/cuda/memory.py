"""The GPU memory that KV pages take: computed from the free memory, without a trial run. Also turns running
out of memory into an error that names the fix."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from quire_common.errors import ConfigError
from quire_worker.model.arch_spec import DecoderSpec

# CUDA's own context, graphs' nodes, cuBLAS workspaces, fragments.
_SLACK_BYTES = 1 << 30
_ELEMENT_BYTES = 2
# Of what requests ask of their logits; a thousand sequences with penalties and answers of average length take a tenth.
LOGITS_STATE_BYTES = 256 << 20
STEP_FIX = "Lower --gpu-memory-utilization, --max-num-batched-tokens or --max-num-seqs."


@contextlib.contextmanager
def naming_out_of_memory(what: str, fix: str, param: str = "") -> Iterator[None]:
    """Inside, torch's out-of-memory error becomes a ConfigError that says what did not fit (`what`), and what to do
    (`fix`). `param` is the option that the error names; empty: none."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            "GPU_OUT_OF_MEMORY", f"The GPU has no memory left for {what}: {str(error)[:300]}", fix, param=param
        ) from error


def pool_bytes(spec: DecoderSpec, rows: int, sequences: int, vocab_size: int) -> int:
    """Bytes that the largest step takes while it runs, beside its logits: activations of a layer, and logits in float32
    where controls change them."""
    return rows * spec.row_bytes + 2 * sequences * vocab_size * _ELEMENT_BYTES


def step_bytes(spec: DecoderSpec, rows: int, sequences: int, vocab_size: int) -> int:
    """Return the bytes that the largest step takes in addition to weights and pages: its pool, logits and logits
    processor states. Graphs have their own pool, which steps that run kernel by kernel cannot use. The logits of all
    steps lie in one place."""
    pools = 2 * pool_bytes(spec, rows, sequences, vocab_size)
    return pools + sequences * vocab_size * _ELEMENT_BYTES + LOGITS_STATE_BYTES


def reserve_memory(size: int) -> None:
    """Leave torch's allocator one free block of this many bytes for the current stream. Later allocations are cut from
    this block. Otherwise each step that is larger than all before would take new blocks in addition to theirs. Does
    nothing if the GPU has no such block."""
    with contextlib.suppress(torch.OutOfMemoryError):
        torch.empty(size, dtype=torch.uint8, device="cuda")


def kv_cache_bytes(free: int, total: int, utilization: float, reserve: int) -> int:
    """Return the bytes for KV pages: the free memory, less `reserve` for steps, 1 GiB of slack and the share that
    `utilization` leaves to others.

    `free` and `total` are of the device, once the weights are there. Raises ConfigError where nothing is left.
    """
    left = int(free - total * (1.0 - utilization)) - reserve - _SLACK_BYTES
    if left <= 0:
        raise ConfigError(
            "GPU_MEMORY_TOO_SMALL",
            f"Of the GPU's {total >> 20} MiB, {free >> 20} MiB are free after loading the weights; steps need "
            f"{(reserve + _SLACK_BYTES) >> 20} MiB and --gpu-memory-utilization {utilization:g} leaves the rest.",
            "End other users of the GPU, raise --gpu-memory-utilization, lower --max-num-batched-tokens, or serve a "
            "smaller model.",
            param="gpu_memory_utilization",
        )
    return left
